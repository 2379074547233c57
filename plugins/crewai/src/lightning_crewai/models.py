"""Convert CrewAI's events about model calls to chat completions; chat spans for calls without the openai client."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from lightning_crewai.tools import requests_in
from lightning_openai.completion import assistant_message, chat_completion, tool_call
from lightning_openai.json_text import to_json
from lightning_openai.other_clients import OtherCall

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.record.instrument.scope import Scope
    from lightning_spans.record.instrument.tracker import Tracker
    from lightning_spans.schema.spans import Json

_PARAMETERS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "stream": "stream",
    "seed": "seed",
    "stop_sequences": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "n",
}
_MARK: Final = "cache_breakpoint"  # CrewAI's own field, removed before a message is sent
# providers in this module, and their subclasses, use the openai client
_BY_OPENAI: Final = "crewai.llms.providers.openai"
# Messages and tools of the call about to be reported. The event's own copy is cut at a depth of five.
_offered: ContextVar[tuple[Any, Any] | None] = ContextVar("lightning_crewai_offered", default=None)


@functools.lru_cache(256)
def uses_openai(kind: type) -> bool:
    """Whether a model class uses the openai client."""
    return any(known.__module__.startswith(_BY_OPENAI) for known in kind.__mro__)


def wrap_started(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the event that reports the start of a model call."""

    def emit_call_started_event(llm: Any, messages: Any, tools: Any = None, *args: Any, **kwargs: Any) -> Any:
        token = _offered.set((messages, tools))
        try:
            return original(llm, messages, tools, *args, **kwargs)
        finally:
            _offered.reset(token)

    return emit_call_started_event


def begin_call(tracker: Tracker, scope: Scope, llm: Any, event: Any, context: Context) -> None:
    """Start the chat span of a call, unless the openai client creates one."""
    request = request_body(event, llm, *(_offered.get() or (event.messages, event.tools)))
    OtherCall(
        tracker.recorder,
        tracker.plugin,
        tracker.framework,
        lambda: request,
        provider=getattr(llm, "provider", None),
        streamed=bool(request.get("stream")),
        place=lambda: context,
        scope=scope,
    )


def request_body(event: Any, llm: Any, messages: Any, tools: Any) -> dict[str, Json]:
    """Return the request of a starting call, copied, because messages and tools belong to the agent and may change."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body: dict[str, Json] = {"model": event.model, "messages": messages, "tools": tools or None}
    for key, name in _PARAMETERS.items():  # part of the event since 1.14
        told = getattr(event, key, None)
        body[name] = getattr(llm, key, None) if told is None else told
    copied: dict[str, Json] = json.loads(to_json({name: value for name, value in body.items() if value is not None}))
    for message in copied.get("messages") or ():
        if isinstance(message, dict):
            message.pop(_MARK, None)
    return copied


def response_body(event: Any) -> dict[str, Json]:
    """Return the response of a completed call."""
    text = event.response if event.response is None or isinstance(event.response, str) else to_json(event.response)
    asked = [tool_call(call.call_id, call.name, call.arguments) for call in requests_in(event.response)]
    message = assistant_message(None, asked) if asked else assistant_message(text)
    # The finish reason and id are known since 1.14.7, usage since 1.13.
    body = {"id": getattr(event, "response_id", None), "model": event.model, "usage": getattr(event, "usage", None)}
    kept = {name: value for name, value in body.items() if value is not None}
    return chat_completion((message, getattr(event, "finish_reason", None)), **kept)
