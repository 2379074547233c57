"""Chat spans for generators that do not use the openai client (Anthropic, Bedrock, Hugging Face), one per call.

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from haystack import component
from haystack.dataclasses import ChatMessage
from haystack.tools import flatten_tools_or_toolsets

from lightning_haystack import FRAMEWORK
from lightning_openai.completion import assistant_message, chat_completion, chat_request
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.instrument.scope import Scope, place_of_call
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

# These always use the openai client or other generators.
_BY_OTHERS: Final = tuple(
    f"haystack.components.generators.{module}"
    for module in ("openai", "azure", "chat.openai", "chat.azure", "chat.fallback")
)


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch every generator, existing and future ones; what is yielded removes each patch."""
    models = HaystackModels(recorder, FRAMEWORK)
    yield models.stop
    yield models.undo
    yield replace(type(component), "_component", models.wrap_component)
    for kind in list(component.registry.values()):
        models.follow(kind)


class ModelScope(Scope):
    """Scope of a generator's call. A client call within it begins the pending span around it."""

    __slots__ = ()

    def call_begins(self) -> Context | None:
        """Start the surrounding span."""
        return None if self.outer is None else self.outer.call_begins()


class HaystackModels(Tracker):
    """Creates the chat spans of calls for which no client creates one."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self.undo = Undo()

    def wrap_component(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the creation of a component class."""

        def make(decorator: Any, *args: Any, **kwargs: Any) -> Any:
            kind = original(decorator, *args, **kwargs)
            if self.live:
                with self.guard():
                    self.follow(kind)
            return kind

        return make

    def follow(self, kind: Any) -> None:
        """Patch the calls of a class, if it is a generator."""
        for name, wrap in (("run", self.wrap_run), ("run_async", self.wrap_run_async)):
            function = vars(kind).get(name)
            if function is not None and not kind.__module__.startswith(_BY_OTHERS) and _generates(function):
                self.undo.add(replace(kind, name, wrap))

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call."""
        signature = inspect.signature(original)

        def run(generator: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return original(generator, *args, **kwargs)
            call = self._call(generator, signature, args, kwargs)
            return call.called(
                lambda: original(generator, *args, **kwargs), lambda answer: response_body(generator, answer)
            )

        return run

    def wrap_run_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call."""
        signature = inspect.signature(original)

        async def run_async(generator: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(generator, *args, **kwargs)
            if not self.live:
                return await work
            call = self._call(generator, signature, args, kwargs)
            return await call.asked(work, lambda answer: response_body(generator, answer))

        return run_async

    def _call(self, generator: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> OtherCall:
        asked: dict[str, Any] = {}
        with self.guard():
            asked = signature.bind(generator, *args, **kwargs).arguments
        streamed = (asked.get("streaming_callback") or getattr(generator, "streaming_callback", None)) is not None
        return OtherCall(
            self.recorder,
            self.plugin,
            self.framework,
            lambda: request_body(generator, asked),
            streamed=streamed,
            place=place_of_call,
            scope=ModelScope(),
        )


def _generates(run: Any) -> bool:
    asked = {"messages", "prompt"} & {*inspect.signature(run).parameters}
    return bool(asked) and "replies" in getattr(run, "_output_types_cache", {})


def request_body(generator: Any, asked: dict[str, Any]) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    said = asked.get("messages", asked.get("prompt"))
    turns = [ChatMessage.from_user(said)] if isinstance(said, str) else said or ()
    given = asked.get("tools") or getattr(generator, "tools", None)
    tools = [{"type": "function", "function": tool.tool_spec} for tool in flatten_tools_or_toolsets(given)]
    return chat_request(_name(generator), map(_turn, turns), tools)


def response_body(generator: Any, answer: Any) -> dict[str, Json]:
    """Return the answer as a chat completion."""
    replies: Sequence[Any] = answer["replies"]
    metas = [reply.meta for reply in replies if isinstance(reply, ChatMessage)] or answer.get("meta") or [{}]
    return chat_completion(
        *((_turn(reply), meta.get("finish_reason")) for reply, meta in zip(replies, metas, strict=False)),
        model=metas[0].get("model") or _name(generator),
        usage=metas[0].get("usage") or {},
    )


def _turn(message: Any) -> dict[str, Json]:
    if isinstance(message, str):
        return assistant_message(message)
    turn: dict[str, Json] = message.to_openai_dict_format()
    return turn


def _name(generator: Any) -> str:
    return str(getattr(generator, "model", None) or type(generator).__name__)
