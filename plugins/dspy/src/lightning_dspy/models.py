"""Chat spans for a program's own models (`BaseLM`), and no cached answers during training.

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import dspy
from dspy.clients.cache import Cache

from lightning_dspy import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.context import current, current_agent, current_attempt, entered
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.scope import scoped
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import standing

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.spans import Json

_BY_CLIENTS: Final = "dspy.clients"  # DSPy's own models use LiteLLM, or the transport that is patched


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch DSPy to record every model call; what is yielded removes each patch."""
    models = DspyModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(dspy.BaseLM, "forward", models.wrap_forward)
    yield replace_in_subclasses(dspy.BaseLM, "aforward", models.wrap_aforward)
    yield replace(Cache, "get", models.wrap_get)
    yield replace(Cache, "put", models.wrap_put)


class _Caller(NamedTuple):
    """The module that calls the model."""

    agent: str | None
    path: str | None
    attempt: Attempt | None


class DspyModels(Tracker):
    """Creates the chat spans of calls for which no client creates one."""

    def wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        def forward(model: Any, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
            if not self.live:
                return original(model, prompt, messages, **kwargs)
            call = self._call(model, prompt, messages, kwargs)
            try:
                with entered(scoped(call.scope)):
                    answer = original(model, prompt, messages, **kwargs)
            except BaseException as error:
                call.end(error=error)
                raise
            call.end(lambda: response_body(answer))
            return answer

        return forward

    def wrap_aforward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        async def aforward(model: Any, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
            work = original(model, prompt, messages, **kwargs)
            return await (self._call(model, prompt, messages, kwargs).asked(work, response_body) if self.live else work)

        return aforward

    def _call(self, model: Any, prompt: Any, messages: Any, options: dict[str, Any]) -> OtherCall:
        def ask() -> dict[str, Json]:
            given = messages or [{"role": "user", "content": prompt}]
            known = {key: value for key, value in options.items() if isinstance(value, str | int | float | list)}
            return {**known, "model": model.model, "messages": list(given)}

        return OtherCall(self.recorder, self.plugin, self.framework, ask)

    def wrap_get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a cache lookup. While an agent is trained, its policy answers every call anew."""

        def get(cache: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._trained() else original(cache, *args, **kwargs)

        return get

    def wrap_put(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a cache write. Answers of a policy in training are not cached."""

        def put(cache: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._trained() else original(cache, *args, **kwargs)

        return put

    def _trained(self) -> bool:
        if not self.live:
            return False
        with self.guard():
            agent = current_agent()
            caller = _Caller(agent, None if agent is None else standing(agent, current()), current_attempt())
            return caller.attempt is not None and self.recorder.reroutes(caller)
        return False


def response_body(answer: Any) -> dict[str, Json] | None:
    """Return an answer of `BaseLM.forward` as a chat completion; None if it is something else."""
    dump = getattr(answer, "model_dump", None)
    body = dump(mode="json") if callable(dump) else answer
    if isinstance(body, dict):
        return body
    choices = getattr(answer, "choices", None)
    if choices is None:
        return None
    message = {"role": "assistant", "content": to_json([getattr(one.message, "content", None) for one in choices])}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
