"""The embedded engine: `Engine` over a generating thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from lightning_trainer.backends.torch.generate.adjusting import Adjuster
from lightning_trainer.backends.torch.generate.batcher import Batcher
from lightning_trainer.backends.torch.generate.grammar import Grammars
from lightning_trainer.backends.torch.generate.mixed import NO_ADAPTER, MixedLinears
from lightning_trainer.backends.torch.generate.packing import PackedLinears, can_pack
from lightning_trainer.backends.torch.generate.request import Request
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.backends.torch.threads import available_cores
from lightning_trainer.engines.contract import WriteWeights
from lightning_trainer.gateway.engine import STEERED, Engine, SampledPiece, Sampling, add_wait
from lightning_trainer.gateway.prompt.text_stream import TextStream
from lightning_trainer.policies import BASE

ABILITIES: Final = frozenset(
    {
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "grammar",
        STEERED,
    }
)  # fmt: skip - see `lightning_trainer.gateway.engine.abilities`


class TorchEngine:
    """Generates with a model in this process. It owns a thread; `close` ends it."""

    abilities = ABILITIES

    def __init__(self, model: LoadedModel, options: TorchOptions, *, version: int = 0) -> None:
        self._model = model
        self._name = served_name(model, options)
        self.random = random.Random(options.seed)
        self.tool_format = options.tool_format
        self._version = version
        # packed weights would be a second copy, which a quantised model is meant to avoid
        packable = model.base_bits is None and can_pack(model.shape.dtype, model.shape.device)
        names = options.served
        mixed = MixedLinears(model.causal, names, pack=packable) if names else None
        self._grammars = Grammars(model.tokenizer, _vocabulary(model), model.end_tokens)
        self._linears = mixed or (PackedLinears(model.causal) if packable else None)
        self._batcher = Batcher(model, options.slots, _threads(options, model), mixed)
        self.adapters = tuple(AdapterEngine(self, name, number) for number, name in enumerate(names))

    @property
    def model(self) -> str:
        """Name under which the policy is served."""
        return self._name

    @property
    def version(self) -> int:
        """Version number of the weights."""
        return self._version

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, chat template included."""
        return self._model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.max_model_len

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer: `Engine.generate`; with several adapters, from their base model."""
        return self.draw(prompt, sampling, NO_ADAPTER)

    def draw(self, prompt: Sequence[int], sampling: Sampling, adapter: int) -> AsyncIterator[SampledPiece]:
        """Sample one answer with the adapter of this number.

        Raises:
            ValueError: the prompt is empty, leaves no room or has an unknown token, or a sampling option is out of
                range. Raised here, not at the first piece.
            RuntimeError: the engine is closed.
        """
        _check(sampling)
        ids = np.asarray(prompt, np.int32)
        room = self.max_model_len - len(ids)
        if not len(ids):
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; with the answer there is room for {self.max_model_len}"
            )
        known = _vocabulary(self._model)
        if ids.min() < 0 or ids.max() >= known:
            raise ValueError("the prompt has a token that the model does not know")
        if any(not 0 <= token < known for token in sampling.logit_bias):
            raise ValueError("logit_bias has a token that the model does not know")
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        seed = self.random.getrandbits(64) if sampling.seed is None else sampling.seed
        return self._pieces(ids, sampling, limit, seed, adapter)

    async def _pieces(
        self, ids: Any, sampling: Sampling, limit: int, seed: int, adapter: int
    ) -> AsyncIterator[SampledPiece]:
        text = TextStream(self.tokenizer, sampling.stop)
        loop = asyncio.get_running_loop()
        grammar = None if sampling.grammar is None else await asyncio.to_thread(self._grammars.make, sampling.grammar)
        adjuster = Adjuster.of(sampling, ids, grammar)
        answers = self if adapter == NO_ADAPTER else self.adapters[adapter]
        request = Request(
            ids, sampling, limit, random.Random(seed), text, loop,
            adapter=adapter, adjuster=adjuster, newest=lambda: answers.version,
        )  # fmt: skip
        held = self._batcher.held_seconds()
        self._batcher.submit(request)
        try:
            try:
                piece = await request.pieces.get()
            finally:
                add_wait(self._batcher.held_seconds() - held)
            while True:
                if isinstance(piece, Exception):
                    raise piece
                if adjuster is not None and adjuster.failure is not None:
                    raise ValueError(adjuster.failure)
                yield piece
                if piece.finish_reason is not None:
                    return
                piece = await request.pieces.get()
        finally:
            request.cancelled = True

    @property
    def engines(self) -> tuple[Engine, ...]:
        """One engine for each served policy; with several adapters, the frozen model first."""
        return (self, *self.adapters)

    def publish(self, versions: Mapping[str, int], write: WriteWeights | None = None) -> None:  # noqa: ARG002 - shared
        """Use new weights, which are already in place: `PolicyEngines.publish`. Call it inside `still`."""
        self.adapters_changed(versions)
        self.weights_changed(versions.get(self._name, self._version))

    def logprobs(self, policy: str, tokens: Sequence[int]) -> None:  # noqa: ARG002 - the protocol's
        """No log-probabilities: the weights are the learner's own."""
        return

    def counts(self) -> dict[str, int]:
        """Totals since the start: requests, prompt_tokens, reused_tokens (a part of these), generated_tokens."""
        names = ("requests", "prompt_tokens", "reused_tokens", "generated_tokens")
        return {name: self._batcher.counts[name] for name in names}

    @contextmanager
    def still(self) -> Iterator[None]:
        """Wait for running requests to end and hold back the others, so that weights can change."""
        with self._batcher.held():
            yield

    def weights_changed(self, version: int) -> None:
        """Use new weights, which are already in place. Call it inside `still`."""
        if self._linears is not None:
            self._linears.refresh()
        self._batcher.forget()
        self._version = version

    def adapters_changed(self, versions: Mapping[str, int]) -> None:
        """Set the version of the new weights of these adapters; `weights_changed` puts them to use."""
        for adapter in self.adapters:
            adapter.version = versions.get(adapter.model, adapter.version)

    def close(self) -> None:
        """End the thread; unfinished requests get an error."""
        self._batcher.close()
        if self._linears is not None:
            self._linears.undo()


class AdapterEngine:
    """One adapter of an engine, as a separate policy: `Engine`. Requests of all adapters share each batch."""

    abilities = ABILITIES

    def __init__(self, engine: TorchEngine, name: str, number: int) -> None:
        self._engine, self._number = engine, number
        self.tool_format = engine.tool_format
        self.model = name
        self.version = 0

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, chat template included."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._engine.max_model_len

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer: `Engine.generate`, with the errors of `TorchEngine.draw`."""
        return self._engine.draw(prompt, sampling, self._number)


def served_name(model: LoadedModel, options: TorchOptions) -> str:
    """Return the name under which the policy is served; with several adapters, that of the frozen model."""
    return BASE if options.adapters else options.name or model.source.resolve().name


def _vocabulary(model: LoadedModel) -> int:
    size: int = model.causal.config.get_text_config().vocab_size
    return size


def _check(sampling: Sampling) -> None:
    checks = {
        "max_tokens must be at least 1": sampling.max_tokens is None or sampling.max_tokens >= 1,
        "temperature must be 0 or more": 0 <= sampling.temperature < float("inf"),
        "top_p must lie in (0, 1]": 0 < sampling.top_p <= 1,
        "top_k must be 0 (all) or more": sampling.top_k >= 0,
    }
    for message, fine in checks.items():
        if not fine:
            raise ValueError(message)


def _threads(options: TorchOptions, model: LoadedModel) -> int:
    """Return the number of cores for generation: one for each 512 of the model's width.

    The products of a decoding step are small. Measured on two cores with a width of 576: one thread generates as fast
    as two that synchronise after each product, and two threads with half the requests each are 9 % faster for 60 % more
    CPU time, which the agents can use better.
    """
    if options.generate_threads is not None:
        return options.generate_threads
    width: int = model.causal.config.get_text_config().hidden_size
    return max(1, min(width // 512, options.threads if isinstance(options.threads, int) else available_cores()))
