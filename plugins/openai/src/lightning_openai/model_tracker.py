"""Patches for the models of a framework that may be called without a patched client (Anthropic, Bedrock, ...)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_openai.other_clients import OtherCall
from lightning_spans.record.context import settle_context
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.schema.spans import Json


class ModelTracker(Tracker):
    """Creates a chat span for each call for which no client creates one. A plugin reads request and answer.

    Each call opens a scope. If a client, or a nested model, creates a chat span within it, there is no second one.
    A plugin defines `request` and `answer`; `completion` has the parts of which both are composed.

    Attributes:
        parameters: names of the parameters of the model's methods, as far as they may be passed by position.
        by_clients: modules whose models always use a patched client. They are left alone.
        kept: how many of the last items of a streamed answer are read as the answer; None: all of them.
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    by_clients: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[int | None] = None

    def request(self, model: Any, given: Mapping[str, Any]) -> Mapping[str, Json]:
        """Return what a model is asked, with these arguments by name, as the body of a chat completion."""
        raise NotImplementedError

    def provider(self, model: Any) -> str | None:  # noqa: ARG002 - for plugins whose models say it
        """Return the name of the model's provider, if known."""
        return None

    def place(self) -> Context:
        """Return the context for the span of a call that starts now."""
        return settle_context()

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        return OtherCall(
            self.recorder,
            self.plugin,
            self.framework,
            lambda: self.request(model, given),
            provider=self.provider(model),
            streamed=streamed,
            place=self.place,
        )

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json] | None:
        """Return what a model answered, whole or in items, as a chat completion; see `OtherCall.asked`."""
        raise NotImplementedError

    def records(self) -> bool:
        """Whether a call that starts now is recorded."""
        return self.live

    def begin_call(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool = False
    ) -> OtherCall | None:
        """Return the call that starts; None if it is not recorded."""
        if self.records():
            with self.guard():
                return self.call_of(model, args, kwargs, streamed=streamed)
        return None

    def is_by_client(self, original: Callable[..., Any]) -> bool:
        """Whether a model's method always uses a patched client."""
        return original.__module__.startswith(self.by_clients)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call."""
        if self.is_by_client(original):
            return original

        def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self.begin_call(model, args, kwargs)
            if call is None:
                return original(model, *args, **kwargs)
            return call.called(lambda: original(model, *args, **kwargs), lambda whole: self.answer(model, [whole]))

        return ask

    def wrap_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call."""
        if self.is_by_client(original):
            return original

        async def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self.begin_call(model, args, kwargs)
            work = original(model, *args, **kwargs)
            if call is None:
                return await work
            return await call.asked(work, lambda whole: self.answer(model, [whole]))

        return ask

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call with a streamed answer. It may ask the model before the first item is read."""
        if self.is_by_client(original):
            return original

        def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self.begin_call(model, args, kwargs, streamed=True)
            if call is None:
                return original(model, *args, **kwargs)
            with call.start_inside():
                items = original(model, *args, **kwargs)
            if not isinstance(items, Generator):
                return items
            return call.iterate(items, lambda seen: self.answer(model, seen), kept=self.kept)

        return ask

    def wrap_stream_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call with a streamed answer."""
        if self.is_by_client(original):
            return original

        def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self.begin_call(model, args, kwargs, streamed=True)
            items = original(model, *args, **kwargs)
            if call is None or not isinstance(items, AsyncGenerator):
                return items
            return call.steps(items, lambda seen: self.answer(model, seen), kept=self.kept)

        return ask
