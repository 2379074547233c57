"""Seeds for calls that ask for none, so that a run repeats from its own seed whatever order its calls arrive in."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

_ATTEMPTS: Final = 20_000  # whose repeated prompts are counted; far more than run at once


def seed_of(*parts: object, ids: Sequence[int] = ()) -> int:
    """Hash values and token ids to a seed in [0, 2**63)."""
    digest = hashlib.sha256(repr(parts).encode())
    digest.update(array("q", ids).tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


class PromptCounter:
    """Counts how often an attempt's agent asked the same, so that four votes on one prompt are four draws."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, Counter[int]] = OrderedDict()

    def seed(self, run_seed: int, rollout_id: str, attempt_id: str, agent: str | None, ids: Sequence[int]) -> int:
        """Give the seed of a call. The attempt itself is no part of it: a retry draws what the first try would have.

        Of the rollout's id only what follows its last colon counts: a run that is done again, or goes on from a
        checkpoint, names its rollouts ``run:place`` with another ``run``, and draws the same.
        """
        prompt = seed_of(run_seed, rollout_id.rpartition(":")[2], agent, ids=ids)
        counts = self._attempts.setdefault(attempt_id, Counter())
        counts[prompt] += 1
        while len(self._attempts) > _ATTEMPTS:
            self._attempts.popitem(last=False)
        return seed_of(prompt, counts[prompt])

    def forget(self, attempt_id: str) -> None:
        """Drop the counts of an attempt that has ended."""
        self._attempts.pop(attempt_id, None)


def seeds_of_choices(seed: int, n: int) -> list[int]:
    """Give each choice its own seed; the first has the call's, so n=1 draws the same as choice 0 of n=2."""
    return [seed, *(seed_of(seed, choice) for choice in range(1, n))]
