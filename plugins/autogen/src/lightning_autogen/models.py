"""Chat spans for models that AutoGen calls without the openai client (Anthropic, Ollama, ...).

Each call opens a scope. If the openai client creates a chat span within it, this module creates none: the model client
is then one of OpenAI's, or a cache around one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_core.models import ChatCompletionClient, CreateResult

from lightning_autogen import FRAMEWORK
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import NOT_ASKED, OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import place_of_call

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_ROLES: Final = {"SystemMessage": "system", "UserMessage": "user", "AssistantMessage": "assistant"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AutoGen to record every call of a model client; what is yielded removes each patch."""
    models = AutogenModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(ChatCompletionClient, "create", models.wrap_async)
    yield replace_in_subclasses(ChatCompletionClient, "create_stream", models.wrap_stream_async)


class AutogenModels(ModelTracker):
    """Reads requests and answers of AutoGen's model clients."""

    by_clients = ("autogen_ext.models.openai.",)
    kept = 1  # the last item of a stream is the whole answer

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        messages = args[0] if args else kwargs["messages"]

        def ask() -> dict[str, Json]:
            return _request(model, messages, kwargs)

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed, place=place_of_call)

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json] | None:  # noqa: ARG002 - not in a result
        """Return what a model answered as a chat completion; None for a stream that was not read to its end."""
        return _answer(items[-1])


def _request(client: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    extra = options.get("extra_create_args") or {}
    known = {**(getattr(client, "_create_args", None) or {}), **extra}
    model = known.get("model") or getattr(client, "_model_name", None) or type(client).__name__
    tools = [getattr(tool, "schema", tool) for tool in options.get("tools") or ()]
    request = {**known, "model": model, "messages": [part for given in messages for part in _message(given)]}
    return {**request, "tools": [{"type": "function", "function": dict(tool)} for tool in tools]} if tools else request


def _message(message: Any) -> list[dict[str, Json]]:
    if message.type == "FunctionExecutionResultMessage":
        return [{"role": "tool", "tool_call_id": part.call_id, "content": part.content} for part in message.content]
    content = message.content
    if message.type == "AssistantMessage":
        return [_assistant(content)]
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else "<image>" for part in content)
    return [{"role": _ROLES[message.type], "content": content}]


def _assistant(content: Any) -> dict[str, Json]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in content
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _answer(result: Any) -> Mapping[str, Json] | None:
    """Return the answer as a chat completion; None for a stream that was not read to its end."""
    if not isinstance(result, CreateResult):
        return None
    if result.cached:
        return NOT_ASKED
    reason = "tool_calls" if result.finish_reason == "function_calls" else result.finish_reason
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": _assistant(result.content), "finish_reason": reason}],
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
    }
