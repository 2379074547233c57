"""Models that LangChain reaches without the openai client: their chat spans are made from LangChain's own events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson
from langchain_core.caches import BaseCache

from lightning_langchain.words import request_text, response_body
from lightning_openai.elsewhere import OtherCall
from lightning_spans.patches import Undo, replace_in_subclasses
from lightning_spans.stays import current_watch

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult

    from lightning_langchain.runs import Run
    from lightning_spans.recorder import Recorder
    from lightning_spans.spans import Json

PLUGIN: Final = "lightning_langchain"
# Known beforehand to use the openai client. The last two are text models, whose asynchronous calls LangChain begins in
# tasks of their own, so that the wire can't tell their runs.
_WIRED: Final = frozenset({"openai-chat", "azure-openai-chat", "openai", "azure"})


def follow_caches() -> Callable[[], None]:
    """Note the answers that LangChain's caches give, until the callable that is given back is called."""
    undo = Undo()
    undo.add(replace_in_subclasses(BaseCache, "lookup", _wrap_lookup))
    undo.add(replace_in_subclasses(BaseCache, "alookup", _wrap_alookup))
    return undo


def _wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(original(cache, *args, **kwargs))

    return lookup


def _wrap_alookup(original: Callable[..., Any]) -> Callable[..., Any]:
    async def alookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(await original(cache, *args, **kwargs))

    return alookup


def _noted(found: Any) -> Any:
    run: Any = current_watch()
    if isinstance(found, list) and getattr(run, "kind", None) == "chat":  # what LangChain takes for an answer
        run.cached = True
    return found


class Elsewhere:
    """Makes the chat span of a call that the wire did not see by the call's end, so that one call is one span."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wired: set[str] = set()  # classes of models of which the wire saw calls; of LiteLLM's only some

    def begin(
        self,
        run: Run,
        serialized: Mapping[str, Any] | None,
        asked: Sequence[BaseMessage] | str,
        params: Mapping[str, Any],
    ) -> bool:
        """Keep what is asked, at once: the messages are the agent's, and may change.

        Of a class that the wire has seen only references are kept: it will hardly be needed, and text costs time.

        Returns:
            Whether this run must be told of what the wire sees: not for a model that is known to be the wire's.
        """
        if params.get("_type") in _WIRED:
            return False
        run.model = ".".join((serialized or {}).get("id") or [run.name])
        OtherCall(
            self._recorder,
            PLUGIN,
            "langchain",
            functools.partial(
                _ask,
                asked if isinstance(asked, str) else list(asked),
                {"model": run.metadata.get("ls_model_name") or run.name, **params},
            ),
            at_once=run.model not in self._wired,
            provider=run.metadata.get("ls_provider"),
            place=lambda: run.context,
            stay=run,
        )
        return True

    def end(self, run: Run, response: LLMResult | None, error: BaseException | None) -> None:
        """Make the span, unless the wire made one, or a cache answered.

        A model that is known to be the wire's and made no call failed before it called.
        """
        if run.seen:
            self._wired.add(run.model)
        if run.call is not None and not run.cached:
            run.call.end(None if response is None else functools.partial(response_body, response), error=error)


def _ask(asked: Sequence[BaseMessage] | str, params: Mapping[str, Any]) -> dict[str, Json]:
    request: dict[str, Json] = orjson.loads(request_text(asked, params))
    return request
