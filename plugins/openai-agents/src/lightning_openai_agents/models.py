"""Chat spans for models that do not use the openai client's HTTP calls: LiteLLM, or Responses over a websocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_openai.completion import assistant_message, chat_completion, tool_call
from lightning_openai.other_clients import OtherCall

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.record.instrument.scope import Scope
    from lightning_spans.record.instrument.tracker import Tracker
    from lightning_spans.schema.spans import Json

MODEL: Final = frozenset({"generation", "response"})  # the SDK's spans of model calls
_NOT_SENT: Final = frozenset({"base_url", "model_impl"})  # part of a model's settings, but not of its requests


def begin_call(tracker: Tracker, scope: Scope, data: Any, context: Context) -> None:
    """Start the chat span of a model call that the SDK reports, unless the openai client creates one."""
    OtherCall(
        tracker.recorder,
        tracker.plugin,
        tracker.framework,
        lambda: _bodies(data)[0],
        at_once=False,
        endpoint="/chat/completions" if data.type == "generation" else "/responses",
        place=lambda: context,
        scope=scope,
    )


def response_of(data: Any) -> dict[str, Json] | None:
    """Return the response of a finished model call."""
    return _bodies(data)[1]


def _bodies(data: Any) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Return request and response of a model call, as far as the SDK has reported them."""
    return (_generation if data.type == "generation" else _response)(data)


def _generation(data: Any) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Return request and response of a generation span, as bodies of a chat completion."""
    given = (data.model_config or {}).items()
    settings = {key: value for key, value in given if value is not None and key not in _NOT_SENT}
    request = {**settings, "model": data.model, "messages": list(data.input or [])}
    if not data.output:
        return request, None
    choices = ((_message(message), None) for message in data.output)
    return request, chat_completion(*choices, model=data.model, usage=data.usage)


def _message(output: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a model's answer as a message. The SDK keeps a streamed one as a body of `/responses`."""
    if output.get("object") != "response":
        return output
    items = output.get("output") or ()
    texts = [part.get("text") or "" for item in items for part in item.get("content") or ()]
    calls = [
        tool_call(item.get("call_id"), item["name"], item["arguments"])
        for item in items
        if item.get("type") == "function_call"
    ]
    return assistant_message("".join(texts) or None, calls)


def _response(data: Any) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Return request and response of a response span, as bodies of `/responses`."""
    given = [] if data.input is None else data.input
    if data.response is None:
        return {"input": given}, None
    response = data.response.model_dump(mode="json", exclude_unset=True)
    told = ("model", "instructions", "tools", "temperature", "top_p", "max_output_tokens")
    return {"input": given, **{key: response[key] for key in told if response.get(key) is not None}}, response
