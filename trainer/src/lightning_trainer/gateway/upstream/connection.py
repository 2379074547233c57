"""HTTP to the replicas of one upstream: requests, responses, and detection of each server's kind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.record.stalls import Wait, waiting
from lightning_spans.record.unrecorded import asked_by_training
from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.upstream.dialects import Dialect, as_chat, dialect_of
from lightning_trainer.gateway.upstream.errors import BrokenError, object_of, refusal_of, upstream_failure
from lightning_trainer.gateway.upstream.replicas import Replica

if TYPE_CHECKING:
    import aiohttp

logger = masking_logger(__name__)
MOST_BYTES: Final = 64 * 2**20  # bytes of one answer; 100,000 tokens with ids and log-probabilities are about 20 MB
_UNWELL = frozenset({502, 503, 504})  # another replica may succeed
_UNLISTED: Final = frozenset({401, 403, 404, 405})  # there is no list of models, or not for this key
# Our own gateway rejects requests for the likeliest tokens if its own engine answers, whose log-probabilities include
# the temperature (400), or if nothing behind it completes a text, so that it returns no tokens either.
_GIVES_NO_TOP: Final = frozenset({400, 404, 405})
_AGAIN_S: Final = 60.0  # seconds after which a server without a list is asked for one again: it may have been starting

_TOLD_UNLISTED: Final = (
    "%s answered %d, so this server counts as one that sends no tokens, and its calls are not used for training. If it"
    " is"
    " vLLM, SGLang or a gateway of ours, let this path through to it, with a key that may read it. It is tried again"
    " every %g s."
)


class Connection:
    """Connections to all replicas.

    Args:
        key: their bearer key; None: none.
        silence_s: seconds without a byte after which an answer has failed.
        total_s: most seconds of an answer; None: no limit.
        waits_for: name of a wait for them.
    """

    def __init__(self, key: str | None, *, silence_s: float, total_s: float | None, waits_for: str) -> None:
        self._key, self._silence_s, self._total_s, self._waits_for = key, silence_s, total_s, waits_for
        self._session: aiohttp.ClientSession | None = None
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def response(self, replica: Replica, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a POST to a replica, or a GET if there is no body; return a successful response.

        Raises:
            Refusal: the upstream's own error.
            BrokenError: it cannot be reached, the connection broke, or it reports that it is not healthy.
        """
        import aiohttp

        url, began = f"{replica.url}{path}", time.monotonic()
        try:
            method, data = ("GET", None) if body is None else ("POST", dumps(body))
            asking = self._client().request(method, url, data=data, allow_redirects=False)
            with waiting("upstream", self._waits_for), asked_by_training():
                async with asyncio.timeout(self._silence_s):
                    response = await asking
            async with response:
                if 300 <= response.status < 400:
                    raise upstream_failure(
                        f"{url} answered with a redirect, which is not followed: its target may be anything"
                    )
                if response.status >= 600:
                    raise upstream_failure(
                        f"{url} answered with the status {response.status}, which HTTP does not have"
                    )
                if response.status >= 400:
                    refusal = refusal_of(
                        response.status, await self.read(response), response.headers.get("retry-after")
                    )
                    raise BrokenError(refusal) if response.status in _UNWELL else refusal
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            stale = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError))
            told = upstream_failure(f"{url} did not answer: {type(error).__name__}: {error}")
            late = self._total_s is not None and time.monotonic() - began >= self._total_s
            raise BrokenError(told, stale=stale, late=late) from error

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read a whole body.

        Raises:
            Refusal: it is larger than any answer.
        """
        with self.arriving(response) as body:
            pieces = []
            while piece := await body.piece():
                pieces.append(piece)
        return b"".join(pieces)

    @contextmanager
    def arriving(self, response: aiohttp.ClientResponse) -> Iterator[Arriving]:
        """Return a body as it arrives. Its wait for the next piece is noted, and has its bound.

        Raises:
            Refusal: it is compressed, although that was not requested.
        """
        if response.headers.get("content-encoding", "identity") != "identity":
            raise upstream_failure(f"{response.url} sent a compressed body, which the request did not accept")
        with waiting("upstream", self._waits_for) as wait:
            body = Arriving(response, wait, self._silence_s)
            try:
                yield body
            finally:
                body.end()

    async def dialect(self, replica: Replica) -> Dialect:
        """Return how tokens are requested from a replica; detected once, if it lists its models.

        Raises:
            BrokenError: it cannot be reached, or is not healthy.
        """
        if replica.dialect is None or time.monotonic() >= replica.again_at:
            async with self._asking:
                if replica.dialect is None or time.monotonic() >= replica.again_at:
                    return await self.find_out(replica)
        return replica.dialect

    async def find_out(self, replica: Replica) -> Dialect:
        """Detect a replica's kind. If it has changed, everything else that was detected is dropped.

        Raises:
            BrokenError: it cannot be reached, or is not healthy.
        """
        listed = await self.models(replica)
        replica.again_at = math.inf if listed is not None else time.monotonic() + _AGAIN_S
        found = "plain" if listed is None else dialect_of(listed)
        if found != replica.dialect:
            replica.dialect, replica.raw_logprobs, replica.tokens, replica.form = found, None, None, None
        return found

    async def models(self, replica: Replica) -> bytes | None:
        """Return the response of ``/models``; None if there is no such page, or none for this key.

        Raises:
            BrokenError: it cannot be reached, is not healthy, or had such a page before.
        """
        import aiohttp

        url = f"{replica.url}/models"
        try:
            timeout = aiohttp.ClientTimeout(total=30.0)
            async with self._client().get(url, timeout=timeout, allow_redirects=False) as response:
                if response.status == 200:
                    return await self.read(response)
                if response.status in _UNLISTED and replica.dialect in {None, "plain"}:
                    if replica.dialect is None:
                        logger.warning(_TOLD_UNLISTED, url, response.status, _AGAIN_S)
                    return None
                raise BrokenError(_listing_refusal(url, response, await self.read(response)))
        except (aiohttp.ClientError, TimeoutError) as error:
            told = upstream_failure(f"{replica.url} did not answer: {type(error).__name__}: {error}")
            raise BrokenError(told) from error

    async def page(self, replica: Replica, path: str, body: Any = None) -> bytes:
        """Return a replica's response on a path, requested by POST if there is a body.

        Raises:
            Refusal: the replica's own error.
            BrokenError: it cannot be reached, or is not healthy.
        """
        async with self.response(replica, path, body) as response:
            return await self.read(response)

    async def gives_raw_logprobs(self, replica: Replica, model: str) -> bool:
        """Return whether a replica's log-probabilities ignore the temperature; detected once."""
        if replica.raw_logprobs is None:
            replica.raw_logprobs = await self._leaves_temperature_out(replica, model)
            if replica.raw_logprobs:
                logger.warning(
                    "%s "
                    "returns log-probabilities at temperature 1 for every temperature. Answers at other temperatures"
                    " are not used for training: start vLLM with --logprobs-mode processed_logprobs, or SGLang without"
                    " SGLANG_RETURN_ORIGINAL_LOGPROB; behind another gateway, too.",
                    replica.url,
                )
        return replica.raw_logprobs

    async def _leaves_temperature_out(self, replica: Replica, model: str) -> bool:
        """Ask for the likeliest token of the same prompt at two temperatures."""
        asked = {"model": model, "prompt": "a", "max_tokens": 1, "logprobs": 1, "seed": 1}
        found = []
        for temperature in (0.5, 2.0):
            body = {**asked, "temperature": temperature}
            try:
                reply = as_chat(object_of(await self.page(replica, "/completions", body)))
            except Refusal as refusal:
                if replica.dialect == "lightning" and refusal.status in _GIVES_NO_TOP:
                    return False
                if refusal.status not in {404, 405}:
                    raise
                raise Refusal(
                    refusal.status,
                    f"{replica.url} is vLLM or SGLang, but has no /completions, which is needed to find out whether its"
                    f" log-probabilities include the temperature ({refusal.message[:200]}). If a proxy is in front of"
                    " it, let /v1/completions through, or name the server itself as the upstream; or sample at"
                    " temperature 1, where this does not matter.",
                    code="no_completions",
                ) from refusal
            try:
                top = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
                found.append(max(other["logprob"] for other in top))
            except (KeyError, IndexError, TypeError, ValueError):
                return False  # it does not say
        return bool(abs(found[0] - found[1]) < 1e-6)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the upstream queues requests, this client does not
                cookie_jar=aiohttp.DummyCookieJar(),  # a response to one attempt must not set what another's call sends
                timeout=aiohttp.ClientTimeout(total=self._total_s, sock_connect=10.0),
                # Not compressed: a small body must not become a large one here.
                headers={**headers, "content-type": "application/json", "accept-encoding": "identity"},
                auto_decompress=False,
            )
        return self._session


def _listing_refusal(url: str, response: aiohttp.ClientResponse, body: bytes) -> Refusal:
    """Return the error for a call whose server's kind could not be detected."""
    if response.status < 400:
        return upstream_failure(f"{url} answered {response.status} and no list of models; redirects are not followed")
    if response.status >= 600:
        return upstream_failure(f"{url} answered with the status {response.status}, which HTTP does not have")
    refusal = refusal_of(response.status, body, response.headers.get("retry-after"))
    return replace(refusal, message=f"{url} answered {response.status}: {refusal.message}")


class Arriving:
    """A body that is read piece by piece. aiohttp's own time limit would set a timer for each piece; this sets few.

    Args:
        response: the response with the body.
        wait: registered while the body is read; it knows when something last arrived.
        silence_s: seconds without a byte after which the answer has failed.
    """

    def __init__(self, response: aiohttp.ClientResponse, wait: Wait, silence_s: float) -> None:
        self._response, self._wait, self._silence_s = response, wait, silence_s
        self._loop = asyncio.get_running_loop()
        self._size = 0
        self._silent = False
        self._timer = self._loop.call_later(silence_s, self._look)

    async def piece(self) -> bytes:
        """Return the next piece; empty at the end.

        Raises:
            Refusal: the body is larger than any answer.
            TimeoutError: nothing arrived for too long.
            aiohttp.ClientError: the connection broke.
        """
        try:
            found = await self._response.content.readany()
        except Exception as error:
            if self._silent:
                raise TimeoutError(f"nothing arrived for {self._silence_s:g} s") from error
            raise
        self._wait.moved()
        self._size += len(found)
        if self._size > MOST_BYTES:
            raise upstream_failure(f"{self._response.url} sent more than {MOST_BYTES} bytes")
        return found

    def end(self) -> None:
        """Note that reading has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._wait.since + self._silence_s - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._silent = True
            self._response.close()
