"""Seeds of a run's calls, so that the run repeats from its own seed in whatever order its calls arrive.

A seed that the program requests is combined with the rollout's. Used alone, it would make all rollouts of a group
sample the same, and equal rollouts teach nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

_ATTEMPTS: Final = 20_000  # attempts whose repeated prompts are counted; far more than run at once


def seed_of(*parts: object, ids: Sequence[int] = ()) -> int:
    """Hash values and token ids to a seed in [0, 2**63)."""
    digest = hashlib.sha256(repr(parts).encode())
    digest.update(array("q", ids).tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


class PromptCounter:
    """Counts repeated prompts of an attempt's agent, so that four votes on one prompt are four samples."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, Counter[int]] = OrderedDict()

    def seed(
        self,
        run_seed: int,
        rollout_id: str,
        attempt_id: str,
        agent: str | None,
        ids: Sequence[int],
        *,
        failures: int = 0,
        asked: int | None = None,
    ) -> int:
        """Return the seed of a call.

        After a failure, an attempt samples anew: with the same samples it would fail again. An attempt that was
        released because its runner or server went away samples the same again. Of the rollout's id only the part after
        its last colon counts: a run that is repeated, or continues from a checkpoint, names its rollouts ``run:place``
        with another ``run``, and samples the same.

        Args:
            run_seed: of the run.
            rollout_id: of the call's rollout.
            attempt_id: of its attempt.
            agent: the calling agent.
            ids: the prompt.
            failures: earlier attempts of the rollout that failed.
            asked: the seed that the request names. With one, equal prompts of an attempt sample the same, as the
                program requests; without, each is a sample of its own.
        """
        again = (failures,) if failures else ()
        prompt = seed_of(run_seed, rollout_id.rpartition(":")[2], agent, *again, ids=ids)
        if asked is not None:
            return seed_of(prompt, "asked", asked)
        counts = self._attempts.setdefault(attempt_id, Counter())
        counts[prompt] += 1
        while len(self._attempts) > _ATTEMPTS:
            self._attempts.popitem(last=False)
        return seed_of(prompt, counts[prompt])

    def forget(self, attempt_id: str) -> None:
        """Drop the counts of an attempt that has ended."""
        self._attempts.pop(attempt_id, None)


def seeds_of_choices(seed: int, n: int) -> list[int]:
    """Return a seed for each choice. The first has the call's, so n=1 samples the same as choice 0 of n=2."""
    return [seed, *(seed_of(seed, choice) for choice in range(1, n))]
