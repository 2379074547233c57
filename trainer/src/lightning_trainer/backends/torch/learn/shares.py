"""Each agent's share of the squared norms of an update's gradients.

An update packs the rows of each agent into separate micro-batches. The gradient that these add, one agent after the
other, is therefore the difference of two sums, and its norm needs no second pass. The earlier sum is kept for that: all
entries if there are few, as for adapters, otherwise a random sample of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Final

import torch
from torch import Tensor

from lightning_trainer.rl.rows import Row

MOST_ENTRIES: Final = 2**24  # entries of a gradient that are compared: 64 MiB in float32


class AgentGradients:
    """Measures the gradient that each agent adds, one optimiser step after the other.

    Args:
        masters: the parameters with the gradient.
        most: maximum number of compared entries; if there are more, a random sample.

    Attributes:
        squares: squared norm of each agent's gradient, summed over the steps that were taken.
    """

    def __init__(self, masters: Iterable[Tensor], most: int = MOST_ENTRIES) -> None:
        self._masters = list(masters)
        self._share = min(1.0, most / max(1, sum(master.numel() for master in self._masters)))
        self._places: list[Tensor] | None = None
        self._before: list[Tensor] | None = None
        self._step: defaultdict[str, float] = defaultdict(float)
        self.squares: dict[str, float] = {}

    def take(self, agent: str, *, last: bool) -> None:
        """Attribute the gradient added since the last call, or since the last step, to this agent.

        Args:
            agent: of the rows in the backward pass.
            last: whether no other agent follows before the step. The gradient of a single agent is the step's.
        """
        if last and self._before is None:
            self._step[agent] = 0.0
            return
        now = self._entries()
        before = self._before or [torch.zeros_like(entries) for entries in now]
        for master, old, new in zip(self._masters, before, now, strict=True):
            self._step[agent] += float((new - old).double().square().sum()) * master.numel() / len(new)
        self._before = now

    def end_step(self, norm: float, *, taken: bool) -> None:
        """Add a step's squares to those of earlier ones; a step that was not taken adds none.

        Args:
            norm: of the whole gradient.
            taken: whether it was finite.
        """
        alone = self._before is None
        for agent, square in self._step.items() if taken else ():
            self.squares[agent] = self.squares.get(agent, 0.0) + (norm**2 if alone else square)
        self._step, self._before = defaultdict(float), None

    def _entries(self) -> list[Tensor]:
        """Return copies of the compared entries of each gradient."""
        grads = [torch.zeros_like(m) if m.grad is None else m.grad for m in self._masters]
        if self._share == 1.0:
            return [grad.flatten().clone() for grad in grads]
        if self._places is None:
            self._places = [_sample(master, self._share) for master in self._masters]
        return [grad.flatten()[places] for grad, places in zip(grads, self._places, strict=True)]


def _sample(master: Tensor, share: float) -> Tensor:
    """Return random indices into a tensor, the same in each run."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(master.numel(), (ceil(share * master.numel()),), generator=numbers).to(master.device)


def gradient_shares(squares: Mapping[str, float], agents: Iterable[str]) -> dict[str, float]:
    """Return each agent's share of the squared norms, `gradient_share/AGENT`; empty for a single agent.

    Args:
        squares: squared norm of each agent's gradient.
        agents: all that have rows; those without a gradient have the share 0.
    """
    named = {agent: square for agent, square in {**dict.fromkeys(agents, 0.0), **squares}.items() if agent}
    total = sum(named.values())
    return {f"gradient_share/{a}": s / total for a, s in named.items()} if len(named) > 1 and total > 0 else {}


def by_agent(rows: Sequence[Row], places: Iterable[int]) -> list[list[int]]:
    """Group indices of rows by the agent of the row, agents in the order of their first row."""
    found: dict[str, list[int]] = {}
    for place in places:
        found.setdefault(rows[place].agent, []).append(place)
    return list(found.values())
