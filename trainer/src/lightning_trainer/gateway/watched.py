"""The store and the engine as the server uses them. Every wait for them is noted, so that a stall has a name."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

from lightning_spans.record.stalls import waiting
from lightning_spans.store import Store
from lightning_trainer.gateway.engine import Engine, SampledPiece, Sampling

T = TypeVar("T")

_WRITES: Final = (
    "add_spans", "add_calls", "add_rewards", "add_deployments", "add_assignments", "enqueue", "claim", "heartbeat",
    "finish", "cancel",
)  # fmt: skip
_READS: Final = ("page", "spans", "calls", "rewards", "rollouts", "attempts")


class _WaitNoter:
    """Passes everything on to the wrapped object; calls of the named methods are noted as waits."""

    def __init__(self, inner: Any, parts: dict[str, str]) -> None:
        self._inner = inner
        for name, part in parts.items():
            if hasattr(inner, name):
                setattr(self, name, _note_waits(getattr(inner, name), part, f"{name} of {_name(inner)}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _name(inner: Any) -> str:
    return str(getattr(inner, "name", type(inner).__name__))


def _note_waits(method: Callable[..., T], part: str, what: str) -> Callable[..., T]:
    @functools.wraps(method)
    def noted(*args: Any, **options: Any) -> T:
        with waiting(part, what):
            return method(*args, **options)

    return noted


def watched_store(store: Store) -> Store:
    """Return the store with its reads and writes noted."""
    parts = {**dict.fromkeys(_READS, "store read"), **dict.fromkeys((*_WRITES, "consume_group"), "store write")}
    return cast(Store, _WaitNoter(store, parts))


class WatchedEngine:
    """An engine that registers its wait for each piece of an answer, so that a stall is reported."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[SampledPiece]:
        """Sample one answer; see `Engine.generate`."""
        what = f"next tokens from {self._engine.model}, for a prompt of {len(prompt)} tokens"
        # Closing this closes the engine's own, which cancels the request.
        async with aclosing(cast(AsyncGenerator[SampledPiece], self._engine.generate(prompt, sampling))) as pieces:
            async for piece in note_each_wait(pieces, "engine", what):
                yield piece


async def note_each_wait(items: AsyncIterator[T], part: str, what: str) -> AsyncGenerator[T]:
    """Return the items. The wait for each is noted, the time of their reader is not."""
    while True:
        with waiting(part, what):
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
        yield item
