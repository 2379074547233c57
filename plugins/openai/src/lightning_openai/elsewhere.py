"""Calls of models that are reached without the openai client: a framework's own event makes their chat span."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import orjson

from lightning_openai.facts import request_facts, response_facts
from lightning_spans import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.recorder import OpenSpan, Recorder
    from lightning_spans.spans import Json

logger = logging.getLogger("lightning_spans")
_told: Final[set[str]] = set()


def record_elsewhere(
    recorder: Recorder,
    framework: str,
    request: Mapping[str, Json],
    response: Mapping[str, Json] | None,
    *,
    endpoint: str = "/chat/completions",
    provider: str | None = None,
    streamed: bool = False,
    error: BaseException | str | None = None,
    context: Context | None = None,
    start_ns: int | None = None,
) -> OpenSpan:
    """Make the chat span of a call that is over and that the wire did not see.

    Such a call has no tokens and can't be rerouted. When it belongs to an agent that is to be trained, that is logged,
    once for each agent.

    Args:
        recorder: takes the span.
        framework: what reported the call.
        request: what was asked, as the body of a request to `endpoint`, as far as known.
        response: what was answered, as its response; None when there was no answer.
        endpoint: whose format the bodies have: ``/chat/completions`` or ``/responses``.
        provider: who served the model, where known.
        streamed: whether the answer was streamed.
        error: what went wrong; None when all went well.
        context: where the call was made; the current context by default.
        start_ns: Unix time in nanoseconds at which the call began; now by default.

    Returns:
        The span, which has ended.
    """
    facts = request_facts(request)
    attributes = {
        names.FRAMEWORK: framework,
        names.PROVIDER: provider,
        names.ENDPOINT: endpoint,
        names.STREAMED: streamed,
        names.REQUEST: to_json(request),
        names.RESPONSE: to_json(response) if response is not None else None,
        **facts,
        **(response_facts(endpoint, response) if response is not None else {}),
    }
    name = facts.get(names.REQUEST_MODEL, "chat")
    span = recorder.start(names.CHAT, name, context=context, start_ns=start_ns, attributes=attributes)
    if span.agent is not None and recorder.reroutes(span) and span.agent not in _told:
        _told.add(span.agent)
        logger.warning(
            "lightning: agent %r is to be trained, but %s reaches its model %r without the openai client's HTTP calls, "
            "so its calls go where they went and have no tokens. Give the agent an OpenAI-compatible client over HTTP.",
            span.agent,
            framework,
            name,
        )
    span.end(error=error)
    return span


def to_json(value: object) -> str:
    """Give JSON text; what JSON does not know is given as its `str`."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json", exclude_unset=True) if callable(dump) else str(value)
