"""Calls answered by another OpenAI-compatible server: forwarded, recorded, and returned unchanged.

A server that can send them is also asked for token ids and log-probabilities; what the agent did not request is removed
from its reply. Other servers' calls are recorded without tokens and never enter RL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lightning_spans.chat.body import messages_of
from lightning_spans.chat.stream import EventReader
from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.calls.answers import Ready, Record
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.masking import mask_secrets
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.assembly import Assembly, record_reply
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.dialects import chunks_of
from lightning_trainer.gateway.upstream.ending import down_note, wait_until_healthy
from lightning_trainer.gateway.upstream.errors import BrokenError, events_of, object_of, upstream_failure
from lightning_trainer.gateway.upstream.parameters import refuse_unknown
from lightning_trainer.gateway.upstream.replicas import Replica, Replicas
from lightning_trainer.gateway.upstream.sampling import SamplingParameters
from lightning_trainer.gateway.upstream.served_names import ServedNames
from lightning_trainer.gateway.upstream.token_path import Route, TokenPath
from lightning_trainer.outgoing import is_url
from lightning_trainer.reasons.continuation import CONTINUATION, ContinuationReason

if TYPE_CHECKING:
    import aiohttp

SILENCE_S: Final = 1800.0  # seconds of silence after which an upstream has failed
_PROBE_S: Final = 2.0  # seconds between checks of replicas that failed


@dataclass(frozen=True, slots=True)
class Upstream:
    """OpenAI-compatible servers that answer for one model.

    Attributes:
        model: the model's name here, and on the servers unless `served` is given.
        url: base URL, with its ``/v1``.
        key: the server's bearer key; None: none. Agents' keys are never sent on.
        replicas: base URLs of more servers that answer for the same model.
        silence_s: seconds without a byte after which an answer has failed.
        total_s: most seconds of an answer; None: no limit.
        paused_s: most seconds that a call waits while the policy is paused.
        any_model: send the name that the request names: for an agent's own provider.
        tokenizer: the model's, including its chat template: conversations are sent as token ids if nothing is lost by
            it.
            None: as messages.
        tool_format: format of the model's tool calls; None: the one that the chat template writes.
        served: the model's name on the servers; None: as here.
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)
    replicas: tuple[str, ...] = ()
    silence_s: float = SILENCE_S
    total_s: float | None = None
    paused_s: float = 600.0
    any_model: bool = False
    tokenizer: Any = field(default=None, repr=False, compare=False)
    tool_format: str | None = None
    served: str | None = None


def parse_upstream(text: str, *, key: str | None = None, total_s: float | None = None) -> Upstream:
    """Parse ``MODEL=URL`` or ``MODEL=URL,URL``: replicas of one model. A URL without a path gets ``/v1``.

    Raises:
        ConfigError: it is not of this form.
    """
    model, _, urls = text.partition("=")
    found = [_base_url(url.strip(), text) for url in urls.split(",")]
    if not model:
        raise ConfigError(f"upstream {text!r}: must be MODEL=URL, such as policy=http://127.0.0.1:8000/v1")
    return Upstream(model, found[0], key, tuple(found[1:]), total_s=total_s)


def parse_provider(url: str, *, key: str | None = None) -> Upstream:
    """Parse the URL of the provider of untrained agents, which may request any model from it.

    Raises:
        ConfigError: it is not a URL.
    """
    return Upstream("provider", _base_url(url, f"provider={url}"), key, any_model=True)


def _base_url(url: str, text: str) -> str:
    if not is_url(url):
        raise ConfigError(f"upstream {text!r}: must be MODEL=URL, such as policy=http://127.0.0.1:8000/v1")
    return url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


class UpstreamPolicy:
    """Answers calls by forwarding them."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.replicas = Replicas((upstream.url, *upstream.replicas))
        self.names = ServedNames(upstream.served or upstream.model)
        self.version: int | None = None  # set by `resume`; None: the routing's
        self._sampling = SamplingParameters(any_model=upstream.any_model)
        self._probing: asyncio.Task[None] | None = None
        self._waits_for = f"{mask_secrets(upstream.url)} to answer for {upstream.model}"
        self._http = Connection(
            upstream.key, silence_s=upstream.silence_s, total_s=upstream.total_s, waits_for=self._waits_for
        )
        self._tokens = self._token_path()
        self.max_model_len: int | None = None  # on the servers

    def under_name(self, served: str) -> UpstreamPolicy:
        """Return a policy of the same servers, for a model with this name on them."""
        return UpstreamPolicy(replace(self.upstream, model=served, served=served))

    def _token_path(self) -> TokenPath | None:
        if self.upstream.tokenizer is None or self.upstream.any_model:
            return None
        model, tokenizer = self.upstream.model, self.upstream.tokenizer
        names = self.names
        paused_s, waits_for = self.upstream.paused_s, self._waits_for
        tool_format = self.upstream.tool_format
        return TokenPath(
            Route(model, names, tokenizer, self._http, self.replicas, paused_s, waits_for, self._unwell, tool_format)
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._probing is not None:
            self._probing.cancel()
        await self._http.close()

    def forget(self, attempt_id: str) -> None:
        """Drop an attempt that has ended."""
        self.replicas.forget(attempt_id)
        self._sampling.forget(attempt_id)
        if self._tokens is not None:
            self._tokens.forget(attempt_id)

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record, if conversations are sent as token ids."""
        if self._tokens is not None:
            self._tokens.remember(pending)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty if only the servers know it."""
        return "" if self._tokens is None else self._tokens.decode(ids)

    def describe(self) -> dict[str, Any]:
        """Return its state."""
        listed = [
            {"url": mask_secrets(replica.url), "in_flight": replica.in_flight, "error": replica.failure}
            for replica in self.replicas.all
        ]
        return {
            "model": self.upstream.model,
            "served": self.names.in_use,
            "version": self.version,
            "paused": self.replicas.paused,
            "in_flight": sum(replica.in_flight for replica in self.replicas.all),
            "replicas": listed,
        }

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        """Answer one request; see `EmbeddedEngine.answer`. The upstream's own errors are returned unchanged.

        If a replica fails before it sent a token, another is used; after the first token there is no second try.

        Raises:
            Refusal: no replica can be reached, or the connection to the answering one broke.
        """
        waits = not self.upstream.any_model  # a provider's outage is no matter of the policy
        noted = await wait_until_healthy(self.replicas, pending, self._waits_for) if waits else {}

        async def record_wait(done: PendingCall) -> None:
            done.note(**noted)
            await record(done)

        try:
            await self._send(pending, sender, record_wait if noted else record, routing)
        finally:
            pending.note(**noted)

    async def _send(self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing) -> None:
        why = None
        if self._tokens is not None and pending.requested.request.get("messages"):
            ready = await self._tokens.ready(pending, lambda: self._stamp(pending, routing))
            if isinstance(ready, Ready):
                await self._tokens.draw(ready, pending, sender, record, routing)
                return
            why = ready
        await self._send_messages(pending, sender, record, routing, why)

    def _stamp(self, pending: PendingCall, routing: Routing, **known: Any) -> None:
        """Store which weights answer now, and what else is known by then."""
        version = routing.versions.get(pending.routed.policy, 0) if self.version is None else self.version
        if known or version != pending.sampled.policy_version:
            pending.sample(policy_version=version, **known)

    async def _send_messages(
        self, pending: PendingCall, sender: ResponseSender, record: Record, routing: Routing, why: str | None
    ) -> None:
        """Answer one request as it arrived; `why` says why it is not sent as token ids, if that could be expected."""
        sampling = self._sampling.in_force(pending, routing)
        if why is not None:
            sampling[CONTINUATION] = why if _continues(pending.requested.request) else ContinuationReason.BEGINS
        self._stamp(pending, routing, sampling=dict(sampling))
        tried: list[Replica] = []
        stale = False
        while True:
            await self.replicas.may_go(self.upstream.paused_s)
            replica = self.replicas.choose(pending.requested.grant.attempt_id, tried)
            if replica is None:  # a connection that was kept open too long says nothing about the server
                replica = tried.pop()
            self._stamp(pending, routing)
            assembly = Assembly(pending)
            try:
                with self.replicas.answering(replica), self.names.call() as served:
                    last = await self._call_replica(replica, pending, sampling, assembly, sender, served=served.name)
                self.replicas.recover(replica)
                break
            except BrokenError as error:
                tried.append(replica)
                self._unwell(replica, error)
                others = len(tried) < len(self.replicas.all)
                if sender.started or assembly.drawn or not (others or (error.stale and not stale)):
                    sampling |= await down_note(error, self._http, replica, pending)
                    raise error.refusal from error
                stale = error.stale
            except Refusal as refusal:
                sampling |= await down_note(refusal, self._http, replica, pending)
                raise
            finally:
                assembly.settle(sampling)
        if self._tokens is not None:
            self._tokens.pass_by(pending)
        await record(pending)
        if isinstance(last, list):
            await sender.last(last)
        else:
            await sender.whole(last)

    async def _call_replica(
        self,
        replica: Replica,
        pending: PendingCall,
        sampling: dict[str, Any],
        assembly: Assembly,
        sender: ResponseSender,
        *,
        served: str,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Call one replica, and again without a soft limit if it rejects it: only it can count the prompt's tokens."""
        try:
            return await self._call_once(replica, pending, sampling, assembly, sender, served=served)
        except Refusal as refusal:
            if refusal.status != 400 or not pending.requested.soft_limit or "max_tokens" not in sampling:
                raise
            first = refusal
        before = pending.sampled.left_out
        pending.sample(left_out={**before, "max_tokens": sampling.pop("max_tokens")})
        try:
            return await self._call_once(replica, pending, sampling, assembly, sender, served=served)
        except Refusal as refusal:
            if refusal.status != 400:
                raise
            sampling["max_tokens"] = pending.sampled.left_out["max_tokens"]
            pending.sample(left_out=before)
            raise first from None

    async def _call_once(
        self,
        replica: Replica,
        pending: PendingCall,
        sampling: dict[str, Any],
        assembly: Assembly,
        sender: ResponseSender,
        *,
        served: str,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Call one replica. Returns a whole answer, or the chunks that end a stream; earlier ones are sent."""
        dialect = await self._http.dialect(replica)
        if pending.requested.grant.attempt_id is not None and not self.upstream.any_model:
            refuse_unknown(dialect, pending.requested.request)
        body = self._sampling.body(dialect, served, pending, sampling)
        heated = dialect != "plain" and body.get("temperature") not in (None, 0, 1)
        if heated and await self._http.gives_raw_logprobs(replica, str(body["model"])):
            sampling["logprobs_temperature"] = 1.0
        path = "/completions" if "prompt" in body else "/chat/completions"
        async with self._http.response(replica, path, body) as response:
            if response.content_type == "text/event-stream":
                return await self._stream(replica, response, assembly, sender, usage=pending.requested.wants_usage)
            completion = record_reply(assembly, await self._http.read(response))
        if pending.requested.request.get("stream") is not True:
            return completion
        return chunks_of(completion, usage=pending.requested.wants_usage)

    async def _stream(
        self,
        replica: Replica,
        response: aiohttp.ClientResponse,
        assembly: Assembly,
        sender: ResponseSender,
        *,
        usage: bool,
    ) -> list[dict[str, Any]]:
        """Send chunks as they arrive; return those from the end of the last choice on, which wait for the record."""
        held: list[dict[str, Any]] = []
        events = EventReader()
        with self._http.arriving(response) as body:
            while not events.done and (piece := await body.piece()):
                news: list[dict[str, Any]] = []
                try:
                    for data in events_of(events, piece):
                        chunk = record_reply(assembly, data)
                        if not usage and _is_usage_alone(chunk):
                            continue
                        (held if assembly.ended else news).append(chunk)
                finally:  # of chunks that arrived together, those before an invalid one are sent
                    if news:
                        await sender.chunks(news)
        if not assembly.ended:
            raise BrokenError(upstream_failure(f"{replica.url} ended its stream before the answer was complete"))
        return held

    def _unwell(self, replica: Replica, error: BrokenError) -> None:
        """Send a replica no more calls until it answers again, as long as others are healthy."""
        self.replicas.fail(replica, str(error))
        if self._probing is None or self._probing.done():
            self._probing = asyncio.ensure_future(self._probe())

    async def _probe(self) -> None:
        while unwell := [replica for replica in self.replicas.all if replica.failure is not None]:
            await asyncio.sleep(_PROBE_S)
            for replica in unwell:
                try:
                    await self._http.find_out(replica)
                    replica.raw_logprobs = replica.tokens = replica.form = None  # it may be another program
                    self.replicas.recover(replica)
                except BrokenError as error:
                    self.replicas.fail(replica, str(error))

    # Requests that are not calls.

    async def count(self, request: Mapping[str, Any]) -> int:
        """Count the tokens of a request's prompt, with vLLM's endpoint.

        Raises:
            Refusal: the upstream cannot say.
        """
        body = {name: request[name] for name in ("messages", "tools") if name in request}
        with self.names.call() as served:
            found = await self._post_to_any("/../tokenize", {**body, "model": served.name})
        number = object_of(found).get("count")
        if not isinstance(number, int):
            raise upstream_failure(f"{self.upstream.url} does not count tokens")
        return number

    async def embeddings(self, body: Mapping[str, Any]) -> bytes:
        """Forward a request for embeddings.

        Raises:
            Refusal: the upstream's own error, or it cannot be reached.
        """
        with self.names.call() as served:
            model = body.get("model") if self.upstream.any_model else served.name
            return await self._post_to_any("/embeddings", {**body, "model": model})

    async def _post_to_any(self, path: str, body: Mapping[str, Any]) -> bytes:
        await self.replicas.may_go(self.upstream.paused_s)
        tried: list[Replica] = []
        while replica := self.replicas.choose(None, tried):
            try:
                async with self._http.response(replica, path, body) as response:
                    return await self._http.read(response)
            except BrokenError as error:
                tried.append(replica)
                self._unwell(replica, error)
                refusal = error.refusal
        raise refusal


def _is_usage_alone(chunk: dict[str, Any]) -> bool:
    """Remove token counts that the agent did not request from a chunk; return whether nothing else is in it."""
    return bool(chunk.pop("usage", None)) and not chunk.get("choices")


def _continues(request: Mapping[str, Any]) -> bool:
    messages = messages_of(request) or ()
    return any(isinstance(message, dict) and message.get("role") == "assistant" for message in messages)
