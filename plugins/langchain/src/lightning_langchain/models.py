"""Models that LangChain reaches without the openai client: their chat spans are made from LangChain's own events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.caches import BaseCache
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from lightning_langchain.agents import ChainRun
from lightning_openai.json_text import to_json
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import current_scope
from lightning_spans.schema.lenient_json import read_json

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult

    from lightning_spans.record.instrument.tracker import Tracker
    from lightning_spans.schema.spans import Json

# Known beforehand to use the openai client. The last two are text models, whose asynchronous calls LangChain begins in
# tasks of their own, so that the client's patch can't tell their runs.
_BY_OPENAI: Final = frozenset({"openai-chat", "azure-openai-chat", "openai", "azure"})


def follow_caches() -> Iterator[Callable[[], None]]:
    """Note the answers that LangChain's caches give, until what is yielded is called."""
    yield replace_in_subclasses(BaseCache, "lookup", _wrap_lookup)
    yield replace_in_subclasses(BaseCache, "alookup", _wrap_alookup)


def _wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(original(cache, *args, **kwargs))

    return lookup


def _wrap_alookup(original: Callable[..., Any]) -> Callable[..., Any]:
    async def alookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _noted(await original(cache, *args, **kwargs))

    return alookup


def _noted(found: Any) -> Any:
    run = current_scope()
    if isinstance(found, list) and isinstance(run, ChainRun) and run.kind == "chat":  # an answer to it
        run.cached = True
    return found


class OtherModels:
    """Makes the chat span of a call that the openai client did not see by the call's end: one call is one span."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._seen: set[str] = set()  # classes of models that the openai client was called by; of LiteLLM's only some

    def begin(
        self,
        run: ChainRun,
        serialized: Mapping[str, Any] | None,
        messages: Sequence[BaseMessage] | str,
        params: Mapping[str, Any],
    ) -> bool:
        """Keep what is asked, at once: the messages are the agent's, and may change.

        Of a class that is known to call the openai client only references are kept: text will hardly be needed, and
        costs time.

        Returns:
            Whether this run must be told of chat spans: not for a model that always uses the openai client.
        """
        if params.get("_type") in _BY_OPENAI:
            return False
        run.model = ".".join((serialized or {}).get("id") or [run.name])
        OtherCall(
            self._tracker.recorder,
            self._tracker.plugin,
            self._tracker.framework,
            functools.partial(
                _request,
                messages if isinstance(messages, str) else list(messages),
                {"model": run.metadata.get("ls_model_name") or run.name, **params},
            ),
            at_once=run.model not in self._seen,
            provider=run.metadata.get("ls_provider"),
            place=lambda: run.context,
            scope=run,
        )
        return True

    def end(self, run: ChainRun, response: LLMResult | None, error: BaseException | None) -> None:
        """Make the span, unless the openai client made one, or a cache answered.

        A model that always uses the openai client and made no call failed before it called.
        """
        if run.seen:
            self._seen.add(run.model)
        if run.call is not None and not run.cached:
            run.call.end(None if response is None else functools.partial(response_body, response), error=error)


def _request(messages: Sequence[BaseMessage] | str, params: Mapping[str, Any]) -> dict[str, Json]:
    """Return what was asked as the body of a chat completion, copied."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else _to_openai(messages)
    rest = {name: value for name, value in params.items() if value is not None and not name.startswith("_")}
    request: dict[str, Json] = read_json(to_json({**rest, "messages": given}))
    return request


def response_body(result: LLMResult) -> dict[str, Json]:
    """Return what such a model answered, as a chat completion."""
    generations = result.generations[0] if result.generations else []
    choices = []
    for index, generation in enumerate(generations):
        message = getattr(generation, "message", None)
        info = {**(generation.generation_info or {}), **(getattr(message, "response_metadata", None) or {})}
        body = _to_openai([message])[0] if message is not None else {"role": "assistant", "content": generation.text}
        reason = info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason")
        choices.append({"index": index, "message": body, "finish_reason": reason})
    first = getattr(generations[0], "message", None) if generations else None
    metadata = getattr(first, "response_metadata", None) or {}
    usage = getattr(first, "usage_metadata", None) or {}
    return {
        "id": metadata.get("id"),
        "object": "chat.completion",
        "model": metadata.get("model_name") or metadata.get("model"),
        "choices": choices,
        "usage": {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")},
    }


def _to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Json]]:
    converted = convert_to_openai_messages(messages)
    return converted if isinstance(converted, list) else [converted]
