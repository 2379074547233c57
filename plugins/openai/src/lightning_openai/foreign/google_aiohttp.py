"""google-genai's asynchronous calls, which use aiohttp if it is installed and httpx otherwise.

Calls of agents in training are sent with httpx, using our own client for each event loop. Other calls keep using
aiohttp and are recorded where google-genai sends them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lightning_openai.call import PLUGIN
from lightning_openai.caller import caller_in
from lightning_openai.foreign.answers import parts_of
from lightning_openai.foreign.dialect import ForeignDialect, ForeignRequest
from lightning_openai.foreign.known import dialect_of
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.context import settle_context, use_context
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.instrument.scope import place_of_call, scopes_around, with_scope
from lightning_spans.record.prompts import with_prompts
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import read_json

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

_MODULE: Final = "google.genai._api_client"
_JSON: Final = "application/json"


def follow(recorder: Callable[[], Recorder | None]) -> Undo:
    """Record the calls that google-genai sends with aiohttp, from its import until the undo.

    Args:
        recorder: returns the recorder; None: nothing is recorded now.
    """

    def wrap_use(original: Callable[..., bool]) -> Callable[..., bool]:
        def use_aiohttp(client: Any) -> bool:
            return original(client) and not _is_rerouted(recorder(), client)

        return use_aiohttp

    def wrap_request(original: Callable[..., Any]) -> Callable[..., Any]:
        async def request(client: Any, http_request: Any, *args: Any, **options: Any) -> Any:
            call = _begin_call(recorder(), client, http_request)
            if call is None:
                return await original(client, http_request, *args, **options)
            return await call.follow(original(client, http_request, *args, **options))

        return request

    def change(module: ModuleType) -> Undo:
        undo = Undo()
        undo.add(replace(module.BaseApiClient, "_use_aiohttp", wrap_use))
        undo.add(replace(module.BaseApiClient, "_async_request_once", wrap_request))
        return undo

    return when_imported(_MODULE, change)


def _is_rerouted(recorder: Recorder | None, client: Any) -> bool:
    """Whether the current call goes to a policy, from an existing client that also has httpx."""
    if recorder is None:
        return False
    whole = getattr(client, "_async_client_session_request_args", None) is not None
    if not whole or getattr(client, "_async_httpx_client", None) is None:
        return False
    return caller_in(settle_context()).goes_to(recorder) is not None


def _begin_call(recorder: Recorder | None, client: Any, request: Any) -> _AiohttpCall | None:
    """Return the call about to be sent; None if it is no model call, or if something else creates its span."""
    if recorder is None or not client._use_aiohttp():
        return None
    with recorder.guard(PLUGIN):
        path = urlsplit(request.url).path
        data = request.data if isinstance(request.data, Mapping) else read_json(request.data or b"{}")
        dialect = dialect_of(path, data)
        if dialect is None:
            return None
        around = next((scope.call for scope in scopes_around() if scope.call is not None), None)
        if isinstance(around, OtherCall):
            around.is_reroutable(list(dialect.read(path, data).untranslated))
        if around is not None:
            return None
        caller = caller_in(settle_context())
        prompted = dialect.prompted(data, lambda body: with_prompts(body, caller.path, caller.attempt))
        if prompted is not None:
            request.data = data = dict(prompted)
        return _AiohttpCall(recorder, dialect, dialect.read(path, data), urlsplit(request.url).hostname)
    return None


class _AiohttpCall:
    """One request."""

    def __init__(self, recorder: Recorder, dialect: ForeignDialect, asked: ForeignRequest, host: str | None) -> None:
        self._dialect = dialect
        context = place_of_call()
        self._call = OtherCall(
            recorder,
            PLUGIN,
            "google-genai",
            lambda: asked.recorded,
            provider=dialect.provider,
            streamed=bool(asked.body.get("stream")),
            place=lambda: context,
            known={names.SERVER_ADDRESS: host, names.UNASKABLE: list(asked.untranslated) or None},
        )

    async def follow(self, sent: Any) -> Any:
        """Await the answer. A stream is recorded while it is read."""
        try:
            with use_context(with_scope(self._call.scope)):
                answer = await sent
        except BaseException as error:
            self._call.end(error=error)
            raise
        if isinstance(answer.response_stream, list):
            self._call.end(lambda: self._dialect.completion(parts_of(answer.response_stream[0], _JSON)))
        else:
            segments = answer.async_segments
            answer.async_segments = lambda: self._read(segments())
        return answer

    async def _read(self, segments: AsyncIterator[Any]) -> AsyncIterator[Any]:
        parts: list[Any] = []
        failed: BaseException | None = None
        try:
            async for part in segments:
                parts.append(part)
                yield part
        except BaseException as error:
            failed = error
            raise
        finally:
            self._call.end((lambda: self._dialect.completion(parts)) if parts else None, error=failed)
