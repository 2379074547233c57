"""Chat spans for models that do not use openai's or LiteLLM's client (Gemini, Anthropic), one per call.

Each call opens a scope. If a client, or a nested model, creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from google.adk.models import BaseLlm

from lightning_google_adk import FRAMEWORK
from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    function_tool,
    token_usage,
    tool_call,
    tool_message,
)
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

    parameters = ("llm_request", "stream")
    by_clients = ("google.adk.models.lite_llm",)
    kept = 1

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments. One of them says whether its answer is streamed."""
        streamed = bool(kwargs.get("stream", args[1] if len(args) > 1 else False))
        return super().call_of(model, args, kwargs, streamed=streamed)

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        return request_body(model, given["llm_request"])

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
        function_tool(declared.name, declared.description, _schema(declared))
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
    (message,) = _turns(answer.content) or [assistant_message(None)]
    called = "tool_calls" if "tool_calls" in message else _FINISH.get(str(reason), reason)
    return chat_completion(
        (message, called),
        id=getattr(answer, "interaction_id", None),
        model=getattr(answer, "model_version", None),
        usage=token_usage(getattr(usage, "prompt_token_count", None), getattr(usage, "candidates_token_count", None)),
    )


def _turns(content: Any) -> list[dict[str, Json]]:
    """Return one content as messages; each tool result is its own message."""
    parts = content.parts or []
    told = [part.function_response for part in parts if part.function_response]
    if told:
        return [tool_message(one.id, to_json(one.response)) for one in told]
    text = "".join(part.text for part in parts if part.text and not part.thought)
    if content.role != "model":
        if any(part.text is None for part in parts):  # images and similar parts
            text = to_json([part.model_dump(exclude_none=True) for part in parts])
        return [{"role": "user", "content": text}]
    calls = [
        tool_call(call.id, call.name, to_json(call.args or {}))
        for call in (part.function_call for part in parts)
        if call
    ]
    return [assistant_message(text or None, calls)]


def _schema(declared: Any) -> Json:
    known = getattr(declared, "parameters_json_schema", None)
    if known is not None:
        return known
    return declared.parameters.model_dump(mode="json", exclude_none=True) if declared.parameters else None
