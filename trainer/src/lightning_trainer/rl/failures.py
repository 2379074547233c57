"""Whose doing a failed attempt is: the policy's, which learns from it, or the machinery's, which it must not.

An agent that raises after a model has answered did so with what the policy said: a parser that found no number, a tool
asked for what does not exist, a process that ended. To leave such attempts out would teach the policy to crash wherever
success pays well, for only successes would count. What the policy had no part in is left out, and tried again.

| the attempt | whose doing |
|---|---|
| raised, or ended its process, after a model's answer | the policy's |
| raised before any model had answered | the machinery's |
| a model call of it was not answered: no connection, a status of 500 or more, 408 or 429 | the machinery's |
| its time was up, its worker or its lease was lost, it was given back | the machinery's |
"""

from __future__ import annotations

from typing import Final

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.schema.attempts import AttemptStatus

_STATUS: Final = "http.response.status_code"  # of OpenTelemetry's conventions, on the chat spans of the openai client
_TRANSIENT: Final = (408, 429)
_SERVER_ERRORS: Final = 500
# How the gateway's own failures begin, for calls of which only its record tells. A refused request is the caller's.
_OURS: Final = (
    "the store can't",
    "the model's server",
    "the engine failed",
    "the gateway failed",
    "the server stopped",
    "client cut the connection",
)


def is_policys(status: AttemptStatus, trace: Trace) -> bool:
    """Whether an attempt that ended so failed by what the policy said.

    Args:
        status: how it ended.
        trace: what is known of it.
    """
    if status != "failed":
        return False
    answered = any(node.error is None for node in trace.chats)
    return answered and not any(_unanswered(node) for node in trace.chats)


def _unanswered(node: Node) -> bool:
    """Whether a model call failed at the machinery, and not at what was asked."""
    if node.error is None:
        return False
    status = node.span.attributes.get(_STATUS)
    if isinstance(status, (int, float, str)) and str(status).isdigit():
        return int(status) >= _SERVER_ERRORS or int(status) in _TRANSIENT
    told = node.call.error if node.call is not None else None
    if told is not None:
        return told.startswith(_OURS)
    return True  # the client alone tells of it, and of no status: there was no answer at all
