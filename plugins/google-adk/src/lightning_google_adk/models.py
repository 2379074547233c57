"""Chat spans for models that do not use openai's or LiteLLM's client (Gemini, Anthropic), one per call.

Each call opens a scope. If a client, or a nested model, creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from google.adk.models import BaseLlm

from lightning_google_adk import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_SETTINGS: Final = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
_FINISH: Final = {"STOP": "stop", "MAX_TOKENS": "length"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch ADK to record every model call; what is yielded removes each patch."""
    models = AdkModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(BaseLlm, "generate_content_async", models.wrap_stream_async)


class AdkModels(ModelTracker):
    """Reads requests and answers of ADK's models. The last item is the whole answer, streamed or not."""

    by_clients = ("google.adk.models.lite_llm",)
    kept = 1

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(("llm_request", "stream"), args, strict=False)), **kwargs}
        streamed = bool(given.get("stream"))

        def ask() -> dict[str, Json]:
            return request_body(model, given["llm_request"])

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json] | None:  # noqa: ARG002 - see `request_body`
        """Return what a model answered as a chat completion."""
        return response_body(items[-1])


def request_body(model: Any, request: Any) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    config = request.config
    body = {name: getattr(config, name, None) for name in _SETTINGS}
    body |= {"max_tokens": config.max_output_tokens, "stop": config.stop_sequences, "n": config.candidate_count}
    system = config.system_instruction
    turns = [{"role": "system", "content": system if isinstance(system, str) else to_json(system)}] if system else []
    turns += [turn for content in request.contents for turn in _turns(content)]
    tools = [
        {
            "type": "function",
            "function": {
                "name": declared.name,
                "description": declared.description,
                "parameters": _schema(declared),
            },
        }
        for tool in config.tools or ()
        for declared in getattr(tool, "function_declarations", None) or ()
    ]
    body |= {"model": request.model or model.model, "messages": turns, "tools": tools or None}
    return {name: value for name, value in body.items() if value is not None}


def response_body(answer: Any) -> dict[str, Json] | None:
    """Return the answer as a chat completion; None if it is an error code instead."""
    if answer.content is None:
        return None
    usage = getattr(answer, "usage_metadata", None)
    reason = getattr(getattr(answer, "finish_reason", None), "name", None)
    (message,) = _turns(answer.content) or [{"role": "assistant", "content": None}]
    called = "tool_calls" if "tool_calls" in message else _FINISH.get(str(reason), reason)
    return {
        "id": getattr(answer, "interaction_id", None),
        "object": "chat.completion",
        "model": getattr(answer, "model_version", None),
        "choices": [{"index": 0, "message": message, "finish_reason": called}],
        "usage": {
            "prompt_tokens": getattr(usage, "prompt_token_count", None),
            "completion_tokens": getattr(usage, "candidates_token_count", None),
        },
    }


def _turns(content: Any) -> list[dict[str, Json]]:
    """Return one content as messages; each tool result is its own message."""
    parts = content.parts or []
    told = [part.function_response for part in parts if part.function_response]
    if told:
        return [{"role": "tool", "tool_call_id": one.id, "content": to_json(one.response)} for one in told]
    text = "".join(part.text for part in parts if part.text and not part.thought)
    if content.role != "model":
        if any(part.text is None for part in parts):  # images and similar parts
            text = to_json([part.model_dump(exclude_none=True) for part in parts])
        return [{"role": "user", "content": text}]
    calls = [
        {
            "id": part.function_call.id,
            "type": "function",
            "function": {"name": part.function_call.name, "arguments": to_json(part.function_call.args or {})},
        }
        for part in parts
        if part.function_call
    ]
    turn: dict[str, Json] = {"role": "assistant", "content": text or None}
    return [{**turn, "tool_calls": calls} if calls else turn]


def _schema(declared: Any) -> Json:
    known = getattr(declared, "parameters_json_schema", None)
    if known is not None:
        return known
    return declared.parameters.model_dump(mode="json", exclude_none=True) if declared.parameters else None
