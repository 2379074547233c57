"""One request in the engine, from `generate` to its last token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.backends.torch.generate.adjusting import Adjuster
from lightning_trainer.backends.torch.generate.sampling import Draw
from lightning_trainer.gateway.engine import FinishReason, SampledPiece, Sampling
from lightning_trainer.gateway.prompt.text_stream import TextStream


@dataclass(slots=True, eq=False)
class Request:
    """A request, its progress and the destination of its answer.

    Attributes:
        prompt: (T,) token ids.
        sampling: how tokens are sampled.
        limit: most tokens to sample: the requested number, or as many as the context allows.
        random: source of random numbers.
        text: turns tokens into text.
        adjuster: changes the logits before each token is sampled; None: no changes.
        loop: event loop that takes the answer.
        pieces: the answer, piece by piece, or the error that ended it.
        cancelled: the answer is no longer needed. Set by the event loop, read by the batcher.
        adapter: number of the adapter that answers; -1 for none.
        newest: returns the number of the weights when the answer begins.
        version: that number; None while it waits.
        drawn: number of sampled tokens.
        slot: of its keys and values; -1 while it waits.
    """

    prompt: NDArray[np.int32]
    sampling: Sampling
    limit: int
    random: random.Random
    text: TextStream
    loop: asyncio.AbstractEventLoop
    adjuster: Adjuster | None = None
    pieces: asyncio.Queue[SampledPiece | Exception] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    adapter: int = -1
    newest: Callable[[], int | None] = lambda: None
    version: int | None = None
    drawn: int = 0
    slot: int = -1

    def next_draw(self) -> Draw:
        """Return how the next token is sampled."""
        sampling = self.sampling
        adjust = None if self.adjuster is None else self.adjuster.apply
        drawn = self.random.random()
        return Draw(sampling.temperature, sampling.top_p, sampling.top_k, drawn, sampling.min_p, adjust)

    def take(self, token: int, logprob: float, *, ends: bool, steered: bool = False) -> SampledPiece:
        """Take a sampled token, and return the piece of the answer that it makes."""
        self.drawn += 1
        if self.adjuster is not None:
            self.adjuster.take(token)
        text, stopped = self.text.push(token)
        reason: FinishReason | None = None
        if ends or stopped:
            reason = "stop"
        elif self.drawn >= self.limit:
            reason = "length"
        if reason is not None and not stopped:
            text += self.text.finish()
        return SampledPiece((token,), (logprob,), text, reason, (steered,), self.version)
