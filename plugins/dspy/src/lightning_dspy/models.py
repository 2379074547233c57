"""Chat spans for a program's own models (`BaseLM`), and no cached answers during training.

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dspy
from dspy.clients.cache import Cache

from lightning_dspy import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.context import current, current_agent, current_attempt
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.recorder import standing

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.spans import Json


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch DSPy to record every model call; what is yielded removes each patch."""
    models = DspyModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(dspy.BaseLM, "forward", models.wrap)
    yield replace_in_subclasses(dspy.BaseLM, "aforward", models.wrap_async)
    yield replace(Cache, "get", models.wrap_cache)
    yield replace(Cache, "put", models.wrap_cache)


class _Caller(NamedTuple):
    """The module that calls the model."""

    agent: str | None
    path: str | None
    attempt: Attempt | None


class DspyModels(ModelTracker):
    """Reads requests and answers of a program's own models, and keeps DSPy's cache out of training."""

    by_clients = ("dspy.clients",)  # DSPy's own models use LiteLLM, or the transport that is patched

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(("prompt", "messages"), args, strict=False)), **kwargs}

        def ask() -> dict[str, Json]:
            prompt, messages = given.pop("prompt", None), given.pop("messages", None)
            known = {key: value for key, value in given.items() if isinstance(value, str | int | float | list)}
            return {**known, "model": model.model, "messages": list(messages or [{"role": "user", "content": prompt}])}

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json] | None:  # noqa: ARG002 - the answer names it
        """Return what a model answered as a chat completion."""
        return response_body(items[0])

    def wrap_cache(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a lookup in the cache, or a write. While an agent is trained, its policy answers every call anew."""

        def use(cache: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._trained() else original(cache, *args, **kwargs)

        return use

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
