"""Chat spans for a program's own models (`BaseLM`), and no cached answers during training.

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dspy
from dspy.clients.cache import Cache

from lightning_dspy import FRAMEWORK
from lightning_openai.caller import caller_in
from lightning_openai.completion import assistant_message, chat_completion, chat_request
from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_spans.record.context import current
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch DSPy to record every model call; what is yielded removes each patch."""
    models = DspyModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(dspy.BaseLM, "forward", models.wrap)
    yield replace_in_subclasses(dspy.BaseLM, "aforward", models.wrap_async)
    yield replace(Cache, "get", models.wrap_cache)
    yield replace(Cache, "put", models.wrap_cache)


class DspyModels(ModelTracker):
    """Reads requests and answers of a program's own models, and keeps DSPy's cache out of training."""

    parameters = ("prompt", "messages")
    by_clients = ("dspy.clients",)  # DSPy's own models use LiteLLM, or the transport that is patched

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        messages = given.get("messages") or [{"role": "user", "content": given.get("prompt")}]
        rest = {name: value for name, value in given.items() if name not in self.parameters}
        known = {name: value for name, value in rest.items() if isinstance(value, str | int | float | list)}
        return {**known, **chat_request(model.model, messages)}

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
            caller = caller_in(current())
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
    text = to_json([getattr(one.message, "content", None) for one in choices])
    return chat_completion((assistant_message(text), "stop"))
