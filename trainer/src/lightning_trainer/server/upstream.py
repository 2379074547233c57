"""Calls answered by another OpenAI-compatible server: forwarded, recorded, and given back as they came.

A server that speaks vLLM's dialect is asked for token ids and log-probabilities as well; what the agent did not ask for
is taken out of its reply again. Other servers' calls are recorded without tokens and never enter RL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from lightning_spans.errors import ConfigError
from lightning_spans.watch import waiting
from lightning_trainer.server.assemble import Assembly
from lightning_trainer.server.draft import Draft
from lightning_trainer.server.embedded import Record
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.refusals import Refusal
from lightning_trainer.server.settings import Routing
from lightning_trainer.server.sse import events_in
from lightning_trainer.server.watched import each_noted

if TYPE_CHECKING:
    import aiohttp

SILENCE_S = 1800.0  # an upstream that sends nothing for so long has failed
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "n", "seed")


@dataclass(frozen=True, slots=True)
class Upstream:
    """An OpenAI-compatible server that answers for one model.

    Attributes:
        model: the model's name, here and there.
        url: base URL, with its ``/v1``.
        key: what the server wants as bearer key; None: nothing. Agents' keys are never sent on.
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)


def parse_upstream(text: str, *, key: str | None = None) -> Upstream:
    """Read ``MODEL=URL``; a URL without a path gets ``/v1``.

    Raises:
        ConfigError: it is not of this form.
    """
    model, equals, url = text.partition("=")
    parts = urlsplit(url)
    if not (model and equals and parts.scheme in {"http", "https"} and parts.netloc):
        raise ConfigError(f"upstream {text!r}: must be MODEL=URL, such as policy=http://127.0.0.1:8000/v1")
    return Upstream(model, url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1", key)


class UpstreamPolicy:
    """Answers chat completions by forwarding them."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None
        self._sends_tokens: bool | None = None  # not asked yet
        self._asking = asyncio.Lock()
        self._waits_for = f"{upstream.url} to answer for {upstream.model}"

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def answer(self, draft: Draft, outlet: Outlet, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`. The upstream's own errors are given back as they are.

        Raises:
            Refusal: the upstream can't be reached, or broke off.
        """
        import aiohttp

        draft.policy_version = routing.versions.get(self._upstream.model, 0)
        assembly = Assembly(draft)
        held: list[dict[str, Any]] | None = None
        whole: dict[str, Any] = {}
        try:
            body = self._body(draft, routing, tokens=await self._asks_for_tokens())
            asking = self._client().post(f"{self._upstream.url}/chat/completions", data=body)
            with waiting("upstream", self._waits_for):
                response = await asking
            async with response:
                if response.content_type == "text/event-stream" and response.status < 400:
                    held = await self._stream(response, assembly, outlet)
                else:
                    with waiting("upstream", self._waits_for):
                        found = await response.read()
                    if response.status >= 400:
                        raise _refusal(response.status, found, response.headers.get("retry-after"))
                    whole = assembly.add(_object(found))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _failed(f"{self._upstream.url} did not answer: {type(error).__name__}: {error}") from error
        finally:
            assembly.settle()
        await record(draft)
        if held is None:
            await outlet.whole(whole)
        else:
            await outlet.last(held)

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt, by vLLM's way of asking.

        Raises:
            Refusal: the upstream can't say.
        """
        body = {name: request[name] for name in ("messages", "tools") if name in request}
        root = self._upstream.url.removesuffix("/v1")
        found = await self._posted(f"{root}/tokenize", {**body, "model": self._upstream.model})
        number = _object(found).get("count")
        if not isinstance(number, int):
            raise _failed(f"{self._upstream.url} does not count tokens")
        return number

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:
        """Pass a request for embeddings on.

        Raises:
            Refusal: the upstream's own, or it can't be reached.
        """
        return await self._posted(f"{self._upstream.url}/embeddings", {**body, "model": self._upstream.model})

    async def _posted(self, url: str, body: Mapping[str, Any]) -> bytes:
        import aiohttp

        try:
            async with self._client().post(url, data=orjson.dumps(body)) as response:
                found = await response.read()
                if response.status >= 400:
                    raise _refusal(response.status, found, response.headers.get("retry-after"))
                return found
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _failed(f"{url} did not answer: {type(error).__name__}: {error}") from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            headers = {"authorization": f"Bearer {self._upstream.key}"} if self._upstream.key else {}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the upstream queues, we don't
                # An answer may take as long as it takes, while something comes.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S),
                headers={**headers, "content-type": "application/json"},
                auto_decompress=True,
            )
        return self._session

    async def _asks_for_tokens(self) -> bool:
        """Whether the server sends token ids when asked: vLLM and servers like this one do, and say who they are."""
        async with self._asking:
            if self._sends_tokens is None:
                async with self._client().get(f"{self._upstream.url}/models") as response:
                    listed = await response.read() if response.status == 200 else b"{}"
                self._sends_tokens = _speaks_vllm(listed)
            return self._sends_tokens

    def _body(self, draft: Draft, routing: Routing, *, tokens: bool) -> bytes:
        body = {**draft.request, "model": self._upstream.model}
        draft.sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        if routing.temperature is not None:
            draft.sampling["temperature_asked"] = body.get("temperature")
            body["temperature"] = draft.sampling["temperature"] = routing.temperature
        if tokens:
            body["return_token_ids"] = body["logprobs"] = True
        return orjson.dumps(body)

    async def _stream(
        self, response: aiohttp.ClientResponse, assembly: Assembly, outlet: Outlet
    ) -> list[dict[str, Any]]:
        """Send chunks as they come; give those from the end of the last choice on, which wait for the record."""
        held: list[dict[str, Any]] = []
        pieces = each_noted(response.content.iter_any(), "upstream", self._waits_for)
        async with aclosing(events_in(pieces)) as found:
            async for data in found:
                if data == b"[DONE]":
                    break
                chunk = assembly.add(_object(data))
                if assembly.ended:
                    held.append(chunk)
                else:
                    await outlet.chunk(chunk)
        if not assembly.ended:
            raise _failed(f"{self._upstream.url} ended its stream before the answer was whole")
        return held


def _failed(what: str) -> Refusal:
    return Refusal(502, f"the model's server {what}", "server_error", "upstream_failed")


def _refusal(status: int, body: bytes, retry_after: str | None = None) -> Refusal:
    """Give an upstream's own error with its status, message and code."""
    try:
        data = orjson.loads(body)
        error = data.get("error", data)  # older vLLM sends the error's fields at the top
        message, kind, code = error["message"], error.get("type"), error.get("code")
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        message, kind, code = body[:500].decode(errors="replace"), None, None
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return Refusal(status, str(message), str(kind or "upstream_error"), None if code is None else str(code), headers)


def _speaks_vllm(listed: bytes) -> bool:
    try:
        models = orjson.loads(listed).get("data") or []
        return any(model.get("owned_by") in {"vllm", "lightning"} for model in models)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return False


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _failed(f"sent no JSON: {error}") from None
    if not isinstance(data, dict):
        raise _failed("sent no JSON object")
    if "error" in data and "choices" not in data:
        raise _refusal(502, body)
    return data
