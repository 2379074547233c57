"""The policies of a learner on vLLM servers: each version is an adapter with its own name."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import httpx

from lightning_spans.chat.stream import EventReader
from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.engines.contract import EngineError, EngineRequest, HeldModel, WriteWeights
from lightning_trainer.engines.gate import Gate
from lightning_trainer.engines.vllm.constrained import mark_steered, marks, read_scores, scoring_request
from lightning_trainer.engines.vllm.rounding import read_vllm_bits
from lightning_trainer.engines.vllm.running import BASE_NAME
from lightning_trainer.engines.vllm.servers import Servers
from lightning_trainer.engines.vllm.weights import replace_weights, write_weights
from lightning_trainer.gateway.engine import SampledPiece, Sampling, add_wait, engine_wait, mark_ended
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.upstream.adapters import AdapterServers
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.errors import BrokenError, object_of, upstream_failure
from lightning_trainer.gateway.upstream.replicas import Replica
from lightning_trainer.gateway.upstream.served_names import ServedName, ServedNames
from lightning_trainer.gateway.upstream.token_protocols import (
    ADJUSTING,
    CompletionsProtocol,
    Reader,
    TokenProtocolError,
)
from lightning_trainer.gateway.upstream.upstream import SILENCE_S

logger = logging.getLogger(__name__)
_WIRE: Final = CompletionsProtocol(grammars=True)
_CALLS_S: Final = 3600.0  # how long old calls may delay the loading of the next version
_TRIES: Final = 3  # of a request of which nothing was sampled yet
_SENDS: Final = 5  # of weights; a server of ours that crashes so often in a row has ended
_SERVERS: Final = frozenset({401, 403, 404, 405})  # another key, or an adapter that a restarted server does not have

Sent = TypeVar("Sent")


class ServedPolicy:
    """One policy on the servers: `Engine`.

    An answer ends on the version with which it began, which each piece names.
    """

    abilities = ADJUSTING | {"grammar"}

    def __init__(self, owner: VllmPolicies, name: str, served: str) -> None:
        self._owner = owner
        self.model = name
        self.names = ServedNames(served, 0)
        self.tool_format = owner.request.tool_format
        self.tokenizer = owner.held.tokenizer
        self.max_model_len = owner.held.max_model_len

    @property
    def version(self) -> int:
        """Number of the newest weights."""
        return self.names.newest.version or 0

    def marks(self, sampling: Sampling) -> bool:
        """Whether steered tokens of such an answer are marked: see `marks_steered`."""
        return marks(sampling)

    def check(self) -> None:
        """Raise the error that has ended the engine permanently.

        Raises:
            EngineError: it has ended.
        """
        self._owner.servers.check()

    async def disconnect(self) -> None:
        """Close the connections of this event loop, which is about to end."""
        await self._owner.disconnect()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer: `Engine.generate`.

        A request that fails before its first token is sent again, if necessary to a restarted server.

        Raises:
            ValueError: the prompt is empty or leaves no room in the context.
            Refusal: the server's own, or it broke off within the answer.
            EngineError: the servers have ended permanently.
        """
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_model_len}")
        most = min(room, sampling.max_tokens or room)
        for left in reversed(range(_TRIES)):
            with engine_wait():
                await self._owner.servers.ready()
            begun, since, urls = False, 0.0, self._owner.servers.urls
            try:
                async with self._owner.gate.passed():
                    since, urls = time.monotonic(), self._owner.servers.urls
                    with self.names.call() as served, self._owner.servers.pulse.noted_if_cut():
                        stream = self._owner.constrained if marks(sampling) else self._owner.stream
                        async for piece in stream(served, prompt, most, sampling):
                            begun = True
                            yield piece
                return
            except (BrokenError, Refusal) as error:
                refusal = _failure_of(error)
                self._owner.servers.suspect()
                if begun or not left:
                    lost_s = time.monotonic() - since
                    if await self._owner.servers.ended(urls):
                        mark_ended(lost_s)
                    raise refusal from error
                add_wait(time.monotonic() - since)
                with engine_wait():
                    await asyncio.sleep(1.0)


class VllmPolicies:
    """The policies of a learner: `PolicyEngines`.

    Args:
        request: what is served.
        held: the learner's model.
        servers: servers that answer for the frozen model under the name `BASE_NAME`.
        folder: where adapters are written for the servers to read; it is removed on `close`.
    """

    def __init__(self, request: EngineRequest, held: HeldModel, servers: Servers, folder: Path) -> None:
        self.request, self.held, self.servers = request, held, servers
        self.random = random.Random(request.seed)
        self._folder = folder
        self._tag = secrets.token_hex(3)  # servers that others started may serve other runs, too
        self.gate = Gate()  # shut while all weights are replaced; adapters get their own names instead
        self._weights: Path | None = None  # the newest, of a policy whose weights are all trained
        self._lock = threading.Lock()
        self._bits = read_vllm_bits(request.options)
        self._unloader = ThreadPoolExecutor(1, "vllm-unload")
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}
        self._raw: dict[str, Replica] = {}
        base = ServedPolicy(self, held.name, BASE_NAME)
        self._policies = {base.model: base}
        self._policies |= {name: ServedPolicy(self, name, BASE_NAME) for name in request.policies}

    @property
    def engines(self) -> tuple[ServedPolicy, ...]:
        """One engine for each policy; with several adapters, the frozen model first."""
        return tuple(self._policies.values())

    @property
    def resident(self) -> list[str]:
        """Names of the adapters that answer calls now, or will."""
        names = [name for policy in self.engines for name in policy.names.in_use]
        return [name for name in names if name != BASE_NAME]

    def still(self) -> AbstractContextManager[None]:
        """Hold nothing back: the servers have their own weights."""
        return nullcontext()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Let the server sleep within the block if memory is short: `RestingEngines.rest`.

        Adapters are neither loaded nor unloaded meanwhile.

        Raises:
            EngineError: it does not fall asleep, or does not wake up.
        """
        with self.gate.shut() if self.servers.sleeps else nullcontext():
            with self.servers.held(), self._lock, self.servers.asleep():  # a server that restarts takes the lock
                yield
            self.servers.wait()  # a crashed server is restarted, and loads what is in use

    def publish(self, versions: Mapping[str, int], write: WriteWeights) -> None:
        """Load new adapters and use them for the next answers: `PolicyEngines.publish`.

        Raises:
            EngineError: the servers do not take one, or calls of old versions do not end.
        """
        if not self.request.lora_rank:
            self._replace(versions, write)
            return
        for name, version in versions.items():
            policy = self._policies[name]
            with waiting("engine", f"calls of earlier versions of {name} to end"):
                if not policy.names.wait(self.request.staleness + 1, _CALLS_S):
                    raise EngineError(f"calls of {name} have been running for {_CALLS_S:g} s. Lower timeout_s.")
            served = f"{name}@{version}.{self._tag}"
            folder = self._folder / served
            shutil.rmtree(folder, ignore_errors=True)
            with waiting("engine", f"vLLM to load {name} {version}"):
                write_weights(write, name, folder)
                self._send(partial(self._load, served, folder))
            before = policy.names.newest.name

            def unused(old: str = before) -> None:
                self._unloader.submit(self._unload, old)

            policy.names.switch(served, version, unused)
        self.servers.settled()

    def _replace(self, versions: Mapping[str, int], write: WriteWeights) -> None:
        """Replace all weights of the only policy between two answers."""
        for name, version in versions.items():
            before, folder = self._weights, self._folder / f"weights.{secrets.token_hex(3)}"
            with waiting("engine", f"answers of {name} to end, and vLLM to take its weights {version}"):
                write_weights(write, name, folder)
                with self.gate.shut():
                    self._weights = folder  # also loaded by a server that is restarted meanwhile
                    self._send(partial(self._load_weights, folder))
                    self._policies[name].names.switch(BASE_NAME, version)
            if before is not None:
                shutil.rmtree(before, ignore_errors=True)
        self.servers.settled()

    def logprobs(self, policy: str, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of tokens under the newest weights: `PolicyEngines.logprobs`.

        Raises:
            EngineError: the server fails.
        """
        return self._send(partial(self._score, policy, tokens))

    def reload(self, url: str) -> None:
        """Load what is in use into a restarted server."""
        if self._weights is not None:
            replace_weights([url], self.servers.key, self._weights)
            return
        with self._lock, AdapterServers([url], self.servers.key, self._bits) as servers:
            for served in self.resident:
                servers.load(served, self._folder / served, self.request.lora_rank)

    def close(self) -> None:
        """Stop the servers that were started, and remove the adapters."""
        self._unloader.shutdown(wait=True)
        self.servers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stream(
        self, served: ServedName, prompt: Sequence[int], most: int, sampling: Sampling
    ) -> AsyncIterator[SampledPiece]:
        """Sample one answer from one version.

        Raises:
            BrokenError: a server cannot be reached, or broke off.
            Refusal: the server's own.
        """
        http, replica = self._connection(), self._replica()
        reader, events, version, ended = _WIRE.reader(prompt, sampling), EventReader(), served.version, False
        seed = self.random.getrandbits(31) if sampling.seed is None else sampling.seed
        body = _WIRE.body(served.name, prompt, most, sampling, stream=True) | {"seed": seed % 2**31}
        if sampling.grammar is not None:
            body["structured_outputs"] = {"grammar": sampling.grammar}
        with self.servers.pulse.request(), _count_in_flight(replica):
            async with http.response(replica, _WIRE.path, body) as response:
                with http.arriving(response) as arriving:
                    while not events.done and (data := await arriving.piece()):
                        self.servers.pulse.beat()
                        for event in events.feed(data):
                            piece = _read_piece(reader, event, replica)
                            if piece is not None:
                                ended = ended or piece.finish_reason is not None
                                yield _with_version(piece, version)
        if not ended:
            raise BrokenError(upstream_failure(f"{replica.url} ended its answer before it was complete"))

    async def constrained(
        self, served: ServedName, prompt: Sequence[int], most: int, sampling: Sampling
    ) -> AsyncIterator[SampledPiece]:
        """Sample one answer that follows a grammar, and mark the steered tokens. Its pieces come at the end.

        Raises:
            BrokenError: a server cannot be reached, broke off, or does not score the answer.
            Refusal: the server's own.
        """
        pieces = [piece async for piece in self.stream(served, prompt, most, sampling)]
        ids = [token for piece in pieces for token in piece.token_ids]
        tokens = [*prompt, *ids][: self.held.max_model_len - 1]  # the scoring request needs room for one more
        http, replica = self._connection(), self._replica()
        with self.servers.pulse.request():
            reply = await http.page(replica, _WIRE.path, scoring_request(served.name, tokens))
        self.servers.pulse.beat()
        try:
            own = read_scores(json.loads(reply), tokens)[len(prompt) - 1 :]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BrokenError(upstream_failure(f"{replica.url} does not score an answer: {error}")) from None
        for piece in mark_steered(pieces, own):
            yield piece

    async def disconnect(self) -> None:
        """Close the connections of this event loop, which is about to end."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.close()

    def _connection(self) -> Connection:
        """Return the connections of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            waits_for = f"vLLM to answer for {self.held.name}"
            self._connections[loop] = Connection(
                self.servers.key, silence_s=SILENCE_S, total_s=None, waits_for=waits_for
            )
        return self._connections[loop]

    def _replica(self) -> Replica:
        """Return the server with the fewest requests in flight."""
        known = [self._raw.setdefault(url, Replica(url)) for url in self.servers.urls]
        return min(known, key=lambda replica: replica.in_flight)

    def _load(self, served: str, folder: Path) -> None:
        with self._lock, AdapterServers(self.servers.urls, self.servers.key, self._bits) as servers:
            servers.load(served, folder, self.request.lora_rank)

    def _load_weights(self, folder: Path) -> None:
        replace_weights(self.servers.urls, self.servers.key, folder)

    def _score(self, policy: str, tokens: Sequence[int]) -> list[float]:
        with self._policies[policy].names.call() as served:
            body = scoring_request(served.name, tokens)
            try:
                headers = {"authorization": f"Bearer {self.servers.key}"} if self.servers.key else {}
                url = f"{self.servers.urls[0]}/completions"
                reply = httpx.post(url, json=body, headers=headers, timeout=SILENCE_S)
                reply.raise_for_status()
                return read_scores(reply.json(), tokens)
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(f"vLLM does not say how likely tokens are under {policy}: {error}") from None

    def _send(self, send: Callable[[], Sent]) -> Sent:
        """Send something to the servers, again if one crashes meanwhile."""
        for _ in range(_SENDS):
            self.servers.wait()
            urls = self.servers.urls
            try:
                with self.servers.pulse.request():
                    sent = send()
                self.servers.pulse.beat()
                return sent
            except ConfigError as error:
                failure = EngineError(str(error))
                if not self.servers.ends(urls):
                    break
        raise failure

    def _unload(self, served: str) -> None:
        """Unload an adapter that no call needs any more."""
        if served == BASE_NAME:
            return
        try:
            with self._lock, AdapterServers(self.servers.urls, self.servers.key) as servers:
                servers.unload(served)
        except ConfigError as error:  # a restarted server does not have it
            logger.debug("%s was not unloaded: %s", served, error)
        shutil.rmtree(self._folder / served, ignore_errors=True)


@contextmanager
def _count_in_flight(replica: Replica) -> Iterator[None]:
    replica.in_flight += 1
    try:
        yield
    finally:
        replica.in_flight -= 1


def _failure_of(error: BrokenError | Refusal) -> Refusal:
    """Return a server's failure as one that is not the request's fault; raise the refusal of a request."""
    if isinstance(error, BrokenError):
        return error.refusal
    if error.status not in _SERVERS and error.status < 500:
        raise error
    return upstream_failure(f"answered {error.status}: {error.message}")


def _read_piece(reader: Reader, event: bytes, replica: Replica) -> SampledPiece | None:
    try:
        return reader.read(object_of(event))
    except TokenProtocolError as error:
        raise BrokenError(upstream_failure(f"{replica.url} {error}")) from None


def _with_version(piece: SampledPiece, version: int | None) -> SampledPiece:
    return SampledPiece(piece.token_ids, piece.logprobs, piece.text, piece.finish_reason, piece.steered, version)
