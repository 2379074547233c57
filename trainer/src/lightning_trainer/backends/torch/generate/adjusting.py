"""Changes of a request to the logits before a token is sampled: penalties, biases, a grammar. V vocabulary.

Recorded log-probabilities are those before these changes: they belong to the policy, which is trained.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.generate.grammar import Grammar
from lightning_trainer.gateway.engine import Sampling


class Adjuster:
    """Changes the logits of one request, with vLLM's formulas."""

    def __init__(self, sampling: Sampling, prompt: NDArray[np.int32], grammar: Grammar | None) -> None:
        self._sampling = sampling
        self._prompt = torch.from_numpy(np.unique(prompt).astype(np.int64))
        self._grammar = grammar
        self._drawn: Counter[int] = Counter()
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()))

    @property
    def failure(self) -> str | None:
        """Why the answer cannot continue; None while it can."""
        return None if self._grammar is None else self._grammar.failure

    @classmethod
    def of(cls, sampling: Sampling, prompt: NDArray[np.int32], grammar: Grammar | None) -> Adjuster | None:
        """Return an adjuster if the request changes anything, otherwise None."""
        asked = (
            grammar is not None,
            sampling.presence_penalty != 0,
            sampling.frequency_penalty != 0,
            sampling.repetition_penalty != 1,
            bool(sampling.logit_bias),
        )
        return cls(sampling, prompt, grammar) if any(asked) else None

    def apply(self, logits_V: Tensor) -> Tensor:
        """Return the logits to sample from, in float32."""
        logits_V = logits_V.float().clone()
        self._penalize(logits_V)
        if len(self._biased):
            logits_V[self._biased.to(logits_V.device)] += self._biases.to(logits_V.device)
        if self._grammar is not None:
            allowed_V = torch.from_numpy(self._grammar.allowed(len(logits_V))).to(logits_V.device)
            logits_V.masked_fill_(~allowed_V, float("-inf"))
        return logits_V

    def take(self, token: int) -> None:
        """Record a sampled token."""
        self._drawn[token] += 1
        if self._grammar is not None:
            self._grammar.take(token)

    def _penalize(self, logits_V: Tensor) -> None:
        device, sampling = logits_V.device, self._sampling
        tokens = torch.tensor(list(self._drawn), dtype=torch.long, device=device)
        if sampling.repetition_penalty != 1:
            seen = torch.unique(torch.cat([self._prompt.to(device), tokens]))
            found = logits_V[seen]
            strength = sampling.repetition_penalty
            logits_V[seen] = torch.where(found > 0, found / strength, found * strength)
        if self._drawn and (sampling.presence_penalty or sampling.frequency_penalty):
            counts = torch.tensor(list(self._drawn.values()), dtype=torch.float32, device=device)
            logits_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
