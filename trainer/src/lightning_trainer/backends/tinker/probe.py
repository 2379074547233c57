"""What a server does with a gradient, measured on a few tokens: servers are not recognised by name.

An optimiser step with an epsilon far above the gradient moves the weights by the gradient times a constant. So the
change of a log-probability shows how large the gradient was, and ratios of such changes show what a server divides by:

    the same sequence twice in one request    2 for a sum, 1 for a mean over sequences
    twice in two requests of one step         2 for a sum or a mean over a request, 1 for a mean over a step
    with a longer tail that moves nothing     1 for a sum, a quarter for a mean over its tokens
    next to one that moves nothing            half for a mean over sequences; less for one over all tokens, which no
                                              weight of a sequence undoes: such a server is rejected
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lightning_trainer.backends.tinker.adapter import Adapter, Averages, Scaling, prompt_logprobs
from lightning_trainer.backends.tinker.errors import PAIRS, TinkerError
from lightning_trainer.backends.tinker.service import Service, sdk, sdk_version

_TOKENS: Final = (1, 3, 4, 5, 3, 6, 4, 7, 5, 8, 9, 3, 7, 6, 10, 4, 8)  # ids that are in every vocabulary
_HELD: Final = 4  # predicted tokens whose log-probabilities are moved
_EPSILON: Final = 1e6
_AIM: Final = 0.3  # nats by which the sum of log-probabilities is moved: far above the rounding of bfloat16
_TINY: Final = 1e-9  # a norm that clips every gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The measured properties of a server.

    Attributes:
        scaling: what the gradient is divided by.
        clips: whether gradients are clipped to the requested norm.
        snapshots: whether published weights stay unchanged while the adapter is trained.
    """

    scaling: Scaling
    clips: bool
    snapshots: bool


def examine(adapter: Adapter) -> Findings:
    """Measure what a server does with the gradient of an adapter, which is useless afterwards.

    Raises:
        TinkerError: the server fails, or does something unknown.
    """
    return _Probe(adapter).findings()


class _Probe:
    """Moves an adapter by its gradient in alternating directions, so that it stays near its start."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._short = np.array(_TOKENS[: _HELD + 1], np.int32)
        self._long = np.array(_TOKENS, np.int32)
        self._still = np.array(_TOKENS[:1] + _TOKENS[2:], np.int32)  # longer, and moves nothing
        self._pace, self._sign = 1e-3, 1.0

    def findings(self) -> Findings:
        """Return the measured properties."""
        sampler, before = self._adapter.sampler(), self._short_logprob()
        self._pace_steps()
        snapshots = self._keeps_snapshots(sampler, before, self._short_logprob())
        alone = dict(self._next_direction() for _ in range(2))  # the two directions differ

        def times(*requests: Sequence[np.ndarray[Any, Any]]) -> int:
            """Return how far the weights move compared with one short sequence, as the nearest power of 2."""
            ratio = self._step_and_measure(*requests) / alone[-self._sign]
            if ratio < 0.1:
                raise self._strange(ratio)
            return round(math.log2(ratio))

        short, long = self._short, self._long
        together, apart, tail = times([short, short]), times([short], [short]), min(times([long]) + 1, 0)
        kinds: dict[tuple[int, int], Averages] = {
            (1, 1): "nothing", (0, 1): "sequences of a request", (0, 0): "sequences of a step",
        }  # fmt: skip
        if (together, apart) not in kinds or tail not in (0, -1):
            raise self._strange(together, apart, tail)
        scaling = Scaling(tokens=tail == -1, sequences=kinds[together, apart])
        if tail and not apart and times([short, self._still]) != -1:
            raise self._strange(together, apart, tail)
        clips = self._step_and_measure([short], grad_clip_norm=_TINY) < alone[-self._sign] / 2
        return Findings(scaling=scaling, clips=clips, snapshots=snapshots)

    def _pace_steps(self) -> None:
        """Choose the size of a step."""
        for _ in range(6):
            moved = self._step_and_measure([self._short])
            if _AIM / 3 < moved < _AIM * 3:
                return
            self._pace *= _AIM / moved if moved > 1e-6 else 100.0
        raise TinkerError(
            f"the Tinker server {self._adapter.service.url} took optimiser steps that did not change the weights. Is"
            " the adapter trained there?"
        )

    def _step_and_measure(self, *requests: Sequence[np.ndarray[Any, Any]], **params: float) -> float:
        """Take a step in the direction opposite to the last one; return how far the log-probabilities moved."""
        adapter, before = self._adapter, self._short_logprob()
        for sequences in requests:
            now = adapter.logprobs(sequences)
            advantages = [
                np.where(np.arange(len(its)) < _HELD, 0.0 if tokens is self._still else self._sign, 0.0).astype("f4")
                for tokens, its in zip(sequences, now, strict=True)
            ]
            adapter.gradient(sequences, [each[1:] for each in sequences], now, advantages, Scaling())
        adapter.step(learning_rate=self._pace * _EPSILON, beta1=0.0, beta2=0.0, eps=_EPSILON, **params)
        moved = self._sign * (self._short_logprob() - before)
        self._sign = -self._sign
        return moved

    def _next_direction(self) -> tuple[float, float]:
        """Return the direction of the next step, and how far it moves with one short sequence."""
        return self._sign, self._step_and_measure([self._short])

    def _short_logprob(self) -> float:
        return float(self._adapter.logprobs([self._short])[0].sum())

    def _keeps_snapshots(self, sampler: Any, before: float, after: float) -> bool:
        """Whether a sampler from before the step has the weights from before, and using it changes nothing.

        SkyRL's JAX backend samples from the adapter that is trained: it overwrites it with the sampler's weights, or
        uses the weights that are there.
        """
        told = float(np.sum(prompt_logprobs(self._adapter.service, sampler, self._short)))
        return abs(told - before) < abs(told - after) and abs(self._short_logprob() - after) < abs(
            self._short_logprob() - before
        )

    def _strange(self, *ratios: float) -> TinkerError:
        return TinkerError(
            f"the Tinker server {self._adapter.service.url} scales gradients in a way that is not known (ratios"
            f" {', '.join(f'{ratio:g}' for ratio in ratios)}), so training would not be exact. Use another server."
        )


def prove_sampling(service: Service, clients: Mapping[str, Any]) -> None:
    """Sample a token from each policy. With an SDK that does not match the server, training works and this fails.

    Args:
        service: the server.
        clients: the SDK's sampling client of each policy.

    Raises:
        TinkerError: it fails; the message names a working pair of versions if the SDK is the cause.
    """
    types = sdk().types
    for name, client in clients.items():
        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        sample = client.sample(prompt=types.ModelInput.from_ints([1]), num_samples=1, sampling_params=params)
        try:
            service.wait(sample, f"sample from {name}")
        except TinkerError as error:
            if isinstance(error.__cause__, AssertionError):
                raise TinkerError(f"tinker {sdk_version()} can't sample from {service.url}: {PAIRS}.") from error
            raise
