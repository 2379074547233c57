"""Chat spans from LangChain's own events, for models that do not use the openai client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.caches import BaseCache
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from lightning_langchain.agents import ChainRun
from lightning_openai.completion import assistant_message, chat_completion, token_usage
from lightning_openai.json_text import to_json
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import current_scope
from lightning_spans.schema.json import read_json

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult

    from lightning_spans.record.instrument.tracker import Tracker
    from lightning_spans.schema.spans import Json

# Known to use the openai client. The last two are text models, whose asynchronous calls LangChain begins in tasks of
# their own, so that the client's patch cannot identify their runs.
_BY_OPENAI: Final = frozenset({"openai-chat", "azure-openai-chat", "openai", "azure"})


def follow_caches() -> Iterator[Callable[[], None]]:
    """Record which answers come from LangChain's caches; what is yielded stops it."""
    yield replace_in_subclasses(BaseCache, "lookup", _wrap_lookup)
    yield replace_in_subclasses(BaseCache, "alookup", _wrap_alookup)


def _wrap_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _note_cache_hit(original(cache, *args, **kwargs))

    return lookup


def _wrap_alookup(original: Callable[..., Any]) -> Callable[..., Any]:
    async def alookup(cache: Any, *args: Any, **kwargs: Any) -> Any:
        return _note_cache_hit(await original(cache, *args, **kwargs))

    return alookup


def _note_cache_hit(found: Any) -> Any:
    run = current_scope()
    if isinstance(found, list) and isinstance(run, ChainRun) and run.kind == "chat":  # an answer to it
        run.cached = True
    return found


class OtherModels:
    """Creates the chat spans of calls that the openai client did not record, so that each call has one span."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        # model classes that were seen to use the openai client; for LiteLLM only some calls do
        self._seen: set[str] = set()

    def begin(
        self,
        run: ChainRun,
        serialized: Mapping[str, Any] | None,
        messages: Sequence[BaseMessage] | str,
        params: Mapping[str, Any],
    ) -> bool:
        """Copy the request at once, because messages belong to the agent and may change.

        For a class that is known to use the openai client, only references are kept: the text is rarely needed, and
        copying takes time.

        Returns:
            Whether this run needs to know of chat spans: not for a model that always uses the openai client.
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
        """Create the span, unless the openai client created one or a cache answered.

        A model that always uses the openai client but made no call failed before the call.
        """
        if run.seen:
            self._seen.add(run.model)
        if run.call is not None and not run.cached:
            run.call.end(None if response is None else functools.partial(response_body, response), error=error)


def _request(messages: Sequence[BaseMessage] | str, params: Mapping[str, Any]) -> dict[str, Json]:
    """Return the request as the body of a chat completion, copied."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else _to_openai(messages)
    rest = {name: value for name, value in params.items() if value is not None and not name.startswith("_")}
    request: dict[str, Json] = read_json(to_json({**rest, "messages": given}))
    return request


def response_body(result: LLMResult) -> dict[str, Json]:
    """Return the answer of such a model as a chat completion."""
    generations = result.generations[0] if result.generations else []
    choices = []
    for generation in generations:
        message = getattr(generation, "message", None)
        info = {**(generation.generation_info or {}), **(getattr(message, "response_metadata", None) or {})}
        body = _to_openai([message])[0] if message is not None else assistant_message(generation.text)
        reason = info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason")
        choices.append((body, reason))
    first = getattr(generations[0], "message", None) if generations else None
    metadata = getattr(first, "response_metadata", None) or {}
    usage = getattr(first, "usage_metadata", None) or {}
    return chat_completion(
        *choices,
        id=metadata.get("id"),
        model=metadata.get("model_name") or metadata.get("model"),
        usage=token_usage(usage.get("input_tokens"), usage.get("output_tokens")),
    )


def _to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Json]]:
    converted = convert_to_openai_messages(messages)
    return converted if isinstance(converted, list) else [converted]
