"""Models that AutoGen reaches without the openai client (Anthropic, Ollama, ...): one chat span for each call.

Every client is watched while it works. If the wire made a chat span meanwhile, the client is one of OpenAI's or a cache
over one, and nothing is made here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from autogen_core.models import ChatCompletionClient, CreateResult

from lightning_autogen.agents import FRAMEWORK, PLUGIN, place
from lightning_openai.elsewhere import NOT_ASKED, OtherCall
from lightning_spans.patches import Undo, replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder
    from lightning_spans.spans import Json

_ROLES: Final = {"SystemMessage": "system", "UserMessage": "user", "AssistantMessage": "assistant"}
_WIRED: Final = "autogen_ext.models.openai."  # its clients always pass the wire


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every call of a client, until the callable that is given back is called."""
    models = Models(recorder)
    undo = Undo()
    undo.add(models.stop)
    undo.add(replace_in_subclasses(ChatCompletionClient, "create", models.wrap_create))
    undo.add(replace_in_subclasses(ChatCompletionClient, "create_stream", models.wrap_create_stream))
    return undo


class Models:
    """Makes the chat spans of calls that the wire does not see."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = True

    def stop(self) -> None:
        """Hear no more."""
        self._live = False

    def wrap_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A model is asked."""
        if original.__module__.startswith(_WIRED):
            return original

        async def create(client: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(client, messages, *args, **kwargs)
            if not self._live:
                return await work
            return await self._call(client, messages, kwargs).asked(work, _answer)

        return create

    def wrap_create_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A model is asked, and its answer streamed."""
        if original.__module__.startswith(_WIRED):
            return original

        def create_stream(client: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            items = original(client, messages, *args, **kwargs)
            return self._steps(items, client, messages, kwargs) if self._live else items

        return create_stream

    async def _steps(
        self, items: AsyncGenerator[Any, None], client: Any, messages: Any, options: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        steps = self._call(client, messages, options, streamed=True).steps(items, _answer)
        try:
            async for item in steps:
                yield item
        finally:
            await steps.aclose()

    def _call(self, client: Any, messages: Any, options: Mapping[str, Any], *, streamed: bool = False) -> OtherCall:
        def ask() -> dict[str, Json]:
            return _request(client, messages, options)

        return OtherCall(self._recorder, PLUGIN, FRAMEWORK, ask, streamed=streamed, place=place)


def _request(client: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Json]:
    """Give what was asked as the body of a chat completion."""
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
    """Give what was answered as a chat completion; None for the pieces of a stream that was left."""
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
