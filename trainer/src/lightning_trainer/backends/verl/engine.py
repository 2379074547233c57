"""verl's vLLM replicas as the gateway's engine: token ids in, token ids out.

While the trainer learns, replicas sleep and their weights change. An answer that is cut by this is not lost: its
sampled tokens stay, and the new weights sample the rest once they are loaded (partial rollouts). Each token keeps the
log-probability of the weights that sampled it; the answer has the version of those that sampled its first. The time for
which a call is held counts as a wait for the engine.

Everything here belongs to one event loop, the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_spans.chat.stream import EventReader
from lightning_spans.errors import LightningError
from lightning_spans.schema.json import read_json
from lightning_trainer.gateway.engine import SampledPiece, Sampling, engine_wait
from lightning_trainer.gateway.upstream.token_protocols import (
    CompletionsProtocol,
    CompletionsReader,
    TokenProtocolError,
)
from lightning_trainer.gateway.upstream.upstream import SILENCE_S

if TYPE_CHECKING:
    import aiohttp

_WIRE: Final = CompletionsProtocol(grammars=False)


class ReplicaError(LightningError):
    """A vLLM replica refused a request or closed the connection early."""


class VllmEngine:
    """Samples answers from the least busy replica.

    Args:
        tokenizer: of the model.
        max_model_len: most tokens of prompt and answer together.
        model: name under which the policy is served.
        tool_format: how the model writes tool calls; None: as its chat template does.
        abilities: what the replicas do exactly; see `lightning_trainer.gateway.engine.abilities`.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        *,
        model: str = "policy",
        abilities: frozenset[str] = frozenset(),
        tool_format: str | None = None,
        adapter: bool = False,
    ) -> None:
        self.model = model
        self.abilities = abilities
        self.tool_format = tool_format
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.version = 0
        self._adapter = adapter
        self._loads: dict[str, int] = {}  # requests in progress by replica
        self._names: dict[str, str] = {}  # the model's name at each replica
        self._serving = asyncio.Event()
        self._streams: set[aiohttp.ClientResponse] = set()
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, addresses: Sequence[str], version: int) -> None:
        """Sample from these replicas (``host:port``), which have the weights of this version."""
        self._loads = {address: self._loads.get(address, 0) for address in addresses}
        self._names = {address: await self._name_at(address) for address in addresses}
        self.version = version
        self._serving.set()

    def pause(self) -> int:
        """Cut the answers in progress and hold requests until `serve`. Returns the number of answers cut."""
        self._serving.clear()
        for stream in self._streams:
            stream.close()
        return len(self._streams)

    async def close(self) -> None:
        """Close the connections."""
        self.pause()
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer; see `Engine.generate`. A stop string that spans a pause is not found.

        Raises:
            ValueError: the prompt is empty or leaves no room in the context.
            ReplicaError: the replica failed.
        """
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_model_len}")
        left = min(room, sampling.max_tokens or room)
        ids, version = list(prompt), self.version
        while True:
            with engine_wait():
                await self._serving.wait()
            if len(ids) == len(prompt):  # an answer that is cut keeps the version that began it
                version = self.version
            async with aclosing(self._stream(ids, left, sampling)) as pieces:
                async for piece in pieces:
                    ids += piece.token_ids
                    left -= len(piece.token_ids)
                    yield replace(piece, version=version)
                    if piece.finish_reason is not None:
                        return
            if left < 1:  # the pause came after the last token, but before the message that it was the last
                yield SampledPiece((), (), "", "length", version=version)
                return

    async def _stream(self, ids: list[int], left: int, sampling: Sampling) -> AsyncGenerator[SampledPiece, None]:
        """Sample from one replica until the answer is finished or a pause cuts it."""
        import aiohttp

        address = min(self._loads, key=lambda name: self._loads[name])
        self._loads[address] += 1
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._connection().post(
                f"http://{address}/v1/completions", data=orjson.dumps(self._body(address, ids, left, sampling))
            )
            if response.status != 200:
                raise ReplicaError(f"vLLM at {address} answered {response.status}: {(await response.text())[:500]}")
            self._streams.add(response)
            reader, events = CompletionsReader(), EventReader()
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    if not self._serving.is_set():
                        return
                    piece = reader.read(read_json(data))
                    if piece is not None:
                        yield piece
                if events.done:
                    return
        except TokenProtocolError as error:
            raise ReplicaError(f"vLLM at {address} {error}") from None
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if self._serving.is_set():
                raise ReplicaError(f"vLLM at {address} broke off: {type(error).__name__}: {error}") from error
        finally:
            if address in self._loads:
                self._loads[address] -= 1
            if response is not None:
                self._streams.discard(response)
                response.close()

    def _body(self, address: str, ids: list[int], left: int, sampling: Sampling) -> dict[str, Any]:
        if sampling.seed is not None:
            # A different seed for each continuation: the same one would sample the same tokens again.
            sampling = replace(sampling, seed=sampling.seed + len(ids))
        return _WIRE.body(self._names[address], ids, left, sampling, stream=True)

    def _connection(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=timeout,
                headers={"content-type": "application/json"},
            )
        return self._session

    async def _name_at(self, address: str) -> str:
        async with self._connection().get(f"http://{address}/v1/models") as response:
            if response.status != 200:
                raise ReplicaError(f"vLLM at {address} answered {response.status}: {(await response.text())[:500]}")
            models = orjson.loads(await response.read())["data"]
        names = [str(model["id"]) for model in models if bool(model.get("parent")) is self._adapter]
        if not names:
            raise ReplicaError(
                f"vLLM at {address} does not list the LoRA adapter that verl sends. To send whole weights instead, set"
                ' "actor_rollout_ref.model.lora.merge" = true in the table verl.'
            )
        return names[0]
