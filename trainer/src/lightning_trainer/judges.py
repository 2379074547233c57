"""Judges of groups: chosen by the table `judge` of a configuration, and applied to rollouts that ended.

A judge compares the rollouts of a group with each other and gives each a reward. Kinds of judges are registered by the
hook `lightning_register_judges`, and chosen with `judge.kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from lightning_spans.errors import LightningError
from lightning_trainer import registry
from lightning_trainer.runner.target import JUDGE

if TYPE_CHECKING:
    from lightning_spans.store import Store
    from lightning_trainer.rl.rollouts import Outcome

CACHE_NAME: Final = "judge.jsonl"  # in a run's folder: verdicts, by what was judged
NO_VERDICT: Final = "the judge gave no verdict"
DEFAULT_KIND: Final = "model"


class RolloutJudge(ABC):
    """Gives rewards to rollouts by comparing those of a group."""

    @abstractmethod
    def verdicts(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes with the judge's rewards, which are also in the store.

        Rollouts that did not succeed are not judged. If the judge gives no verdict, the rollouts of a group are
        excluded, each with the reason in `unjudged`: a missing verdict does not count as 0.
        """

    def judge(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes with the judge's rewards: see `verdicts`.

        Raises:
            LightningError: it gave no verdict on any group.
        """
        judged = self.verdicts(outcomes)
        if (problem := silent(judged)) is not None:
            raise LightningError(problem)
        return judged

    def close(self) -> None:  # noqa: B027 - not every judge holds something
        """Release its resources."""


class JudgePlan(Protocol):
    """The checked options of a judge."""

    @property
    def concurrency(self) -> int:
        """Number of groups that are judged at once."""
        ...

    @property
    def longest_s(self) -> float:
        """Most seconds that judging a group may take."""
        ...

    def open(self, store: Store, *, seed: int, cache: Path | None) -> RolloutJudge:
        """Open the judge.

        Args:
            store: contains the rollouts' traces; receives the judge's rewards.
            seed: of its random choices.
            cache: file in which verdicts may be kept, for a run that resumes; None: they are kept in memory.
        """
        ...


JudgeKind: TypeAlias = Callable[[Mapping[str, Any]], JudgePlan]
"""Reads the table `judge`, without `kind`. Raises ConfigError if an option is missing, unknown or wrong."""


def read_judge(reward: str | None, table: Mapping[str, Any]) -> JudgePlan | None:
    """Read the judge of a configuration; None if it has none.

    Args:
        reward: the option `reward`.
        table: the option `judge`.

    Raises:
        ConfigError: the kind is unknown, or an option is missing, unknown or wrong.
    """
    if not table and reward != JUDGE:
        return None
    kind: JudgeKind = registry.by_name("judge", str(table.get("kind", DEFAULT_KIND)))
    return kind({name: value for name, value in table.items() if name != "kind"})


@contextmanager
def open_judge(plan: JudgePlan | None, store: Store, *, seed: int, cache: Path | None) -> Iterator[RolloutJudge | None]:
    """Open the judge that a configuration names; None if it names none."""
    if plan is None:
        yield None
        return
    with closing(plan.open(store, seed=seed, cache=cache)) as judge:
        yield judge


def silent(outcomes: Sequence[Outcome]) -> str | None:
    """Return why a judge gave no verdict on any of these groups; None if it gave one, or none was requested."""
    asked = [outcome for outcome in outcomes if outcome.attempt is not None]
    if not asked or any(outcome.unjudged is None for outcome in asked):
        return None
    groups = {outcome.rollout.group_id for outcome in asked}
    return f"{NO_VERDICT} on any of {len(groups)} groups: {(asked[-1].unjudged or '').removeprefix(f'{NO_VERDICT}: ')}"
