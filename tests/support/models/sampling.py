"""What an engine samples."""

from __future__ import annotations

from lightning_trainer.backends.torch import TorchEngine
from lightning_trainer.gateway.engine import SampledPiece, Sampling


async def collect(engine: TorchEngine, prompt: list[int], **sampling: object) -> SampledPiece:
    tokens, logprobs, text, reason = [], [], "", None
    async for piece in engine.generate(prompt, Sampling(**sampling)):
        assert reason is None, "nothing comes after the last piece"
        tokens += piece.token_ids
        logprobs += piece.logprobs
        text += piece.text
        reason = piece.finish_reason
    return SampledPiece(tuple(tokens), tuple(logprobs), text, reason)
