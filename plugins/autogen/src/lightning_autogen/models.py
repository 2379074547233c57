"""Chat spans for models that AutoGen calls without the openai client (Anthropic, Ollama, ...).

Each call opens a scope. If the openai client creates a chat span within it, this module creates none: the model client
is then one of OpenAI's, or a cache around one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_core.models import ChatCompletionClient, CreateResult

from lightning_autogen import FRAMEWORK
from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    chat_request,
    token_usage,
    tool_call,
    tool_message,
)
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import NOT_ASKED
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import place_of_call

if TYPE_CHECKING:
    from opentelemetry.context import Context

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

    parameters = ("messages",)
    by_clients = ("autogen_ext.models.openai.",)
    kept = 1  # the last item of a stream is the whole answer

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        extra = given.get("extra_create_args") or {}
        known = {**(getattr(model, "_create_args", None) or {}), **extra}
        name = known.get("model") or getattr(model, "_model_name", None) or type(model).__name__
        schemas = [getattr(tool, "schema", tool) for tool in given.get("tools") or ()]
        tools = [{"type": "function", "function": dict(schema)} for schema in schemas]
        turns = (turn for message in given["messages"] for turn in _message(message))
        return {**known, **chat_request(name, turns, tools)}

    def place(self) -> Context:
        """Return the context of the message that is handled."""
        return place_of_call()

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json] | None:  # noqa: ARG002 - not in a result
        """Return what a model answered as a chat completion; None for a stream that was not read to its end."""
        result = items[-1]
        if not isinstance(result, CreateResult):
            return None
        if result.cached:
            return NOT_ASKED
        reason = "tool_calls" if result.finish_reason == "function_calls" else result.finish_reason
        tokens = token_usage(result.usage.prompt_tokens, result.usage.completion_tokens)
        return chat_completion((_assistant(result.content), reason), usage=tokens)


def _message(message: Any) -> list[dict[str, Json]]:
    if message.type == "FunctionExecutionResultMessage":
        return [tool_message(part.call_id, part.content) for part in message.content]
    content = message.content
    if message.type == "AssistantMessage":
        return [_assistant(content)]
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else "<image>" for part in content)
    return [{"role": _ROLES[message.type], "content": content}]


def _assistant(content: Any) -> dict[str, Json]:
    if isinstance(content, str):
        return assistant_message(content)
    return assistant_message(None, [tool_call(call.id, call.name, call.arguments) for call in content])
