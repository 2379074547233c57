"""Models that LangChain reaches without the openai client: their chat spans are made from LangChain's own events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_langchain.words import request_text, response_body
from lightning_openai.elsewhere import record_elsewhere

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult

    from lightning_langchain.runs import Run
    from lightning_spans.recorder import Recorder

_WIRED: Final = frozenset({"openai-chat", "azure-openai-chat"})  # known beforehand to use the openai client


class Elsewhere:
    """Makes the chat span of a call that the wire did not see by the call's end, so that one call is one span."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wired: set[str] = set()  # classes of models whose calls the wire saw: nothing is kept for those

    def begin(
        self,
        run: Run,
        serialized: Mapping[str, Any] | None,
        asked: Sequence[BaseMessage] | str,
        params: Mapping[str, Any],
    ) -> None:
        """Keep what is asked, at once: the messages are the agent's, and may change."""
        run.model = ".".join((serialized or {}).get("id") or [run.name])
        if params.get("_type") not in _WIRED and run.model not in self._wired:
            model = run.metadata.get("ls_model_name") or run.name
            run.request = request_text(asked, {"model": model, **params})

    def end(self, run: Run, response: LLMResult | None, error: BaseException | None) -> None:
        """Make the span, unless the wire made one.

        A model of the wire that made no call answered from LangChain's cache, or failed before it called.
        """
        if run.seen:
            self._wired.add(run.model)
            return
        if run.request is None:
            return
        run.called()  # a model that wraps this one made no call of its own
        record_elsewhere(
            self._recorder,
            "langchain",
            orjson.loads(run.request),
            response_body(response) if response is not None else None,
            provider=run.metadata.get("ls_provider"),
            error=error,
            context=run.context,
            start_ns=run.start_ns,
        )
