"""The call: the gateway's record of one model call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.schema.spans import TRAINING, Json

LEFT_OUT: Final = "left_out"  # in a call's sampling: what its request asked for and the model did not get, by name
PARTIAL: Final = "partial_tokens"
"""In a call's sampling: how many tokens the server reported, and how many ids it returned. Fewer, so none are kept."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a model call.

    Attributes:
        index: its position among the n choices.
        token_ids: (A,) ids as sampled; None if the engine did not send them.
        logprobs: (A,) natural log-probabilities of `token_ids`; None if not sent.
        finish_reason: ``stop``, ``length``, ``tool_calls``; None if the call was cut off.
        message: the message as the agent got it.
    """

    index: int
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    message: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The gateway's record of one model call.

    Attributes:
        call_id: makes delivery idempotent.
        response_id: the id that the agent's client saw.
        trace_id: from the request's ``x-lightning-traceparent`` or ``traceparent``; None if it had neither.
        span_id: the agent's chat span, from the same header; None if it had neither.
        rollout_id: from the attempt's key.
        attempt_id: from the attempt's key.
        agent: its path, from the ``x-lightning-agent`` header or the key; the span's name has priority.
        origin: the call's purpose: ``training``, ``live``, ``shadow``, or a label of the user's own.
        policy: the model or policy that answered.
        policy_version: the number of the weights that sampled it; of several, the oldest.
        prompt_token_ids: (P,) ids given to the engine; None if it did not send them.
        choices: all n of them.
        request: the request in the format of a chat completion, whatever API it used.
        sampling: the sampling parameters in force, including defaults.
        start_ns: Unix time in nanoseconds.
        end_ns: Unix time in nanoseconds.
        error: what went wrong; None for a call that was answered.
    """

    call_id: str
    response_id: str
    start_ns: int
    end_ns: int
    policy: str
    policy_version: int
    trace_id: str | None = None
    span_id: str | None = None
    rollout_id: str | None = None
    attempt_id: str | None = None
    agent: str | None = None
    origin: str = TRAINING
    prompt_token_ids: tuple[int, ...] | None = None
    choices: tuple[Choice, ...] = ()
    request: Mapping[str, Json] = field(default_factory=dict)
    sampling: Mapping[str, Json] = field(default_factory=dict)
    error: str | None = None
