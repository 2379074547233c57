"""A second judge that is not learned from: it measures how often both judges prefer the same rollouts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, Extra, StepRollouts
from lightning_trainer.judges import DEFAULT_KIND
from lightning_trainer.kits.judging.judge import GroupJudge
from lightning_trainer.kits.judging.options import read_options
from lightning_trainer.report.alarms.rewards import AGREEMENT
from lightning_trainer.runner.target import JUDGE

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.report.progress import Progress
    from lightning_trainer.rl.rollouts import Outcome

VERDICTS: Final = "judge-second.jsonl"  # in a run's folder


class SecondJudgeKind(CallbackKind):
    """Takes part in runs whose judge has a second one."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether the judge is a model with a second one."""
        return config.judge.get("kind", DEFAULT_KIND) == DEFAULT_KIND and "second_model" in config.judge

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Open the second judge."""
        return _open(context)


@contextmanager
def _open(context: CallbackContext) -> Iterator[SecondJudge]:
    run = context.run
    options = read_options({name: value for name, value in run.config.judge.items() if name != "kind"})
    second = replace(
        options,
        endpoint=options.second_endpoint or options.endpoint,
        model=str(options.second_model),
        key_file=options.second_key_file or options.key_file,
    )
    with closing(GroupJudge(second, run.store, seed=run.config.seed, cache=run.folder / VERDICTS)) as judge:
        yield SecondJudge(judge, options.second_groups, run.config.seed, run.progress)


class SecondJudge(Callback):
    """Judges some groups of each step again.

    Args:
        judge: the second one.
        groups: maximum groups of a step.
        seed: of the choice of groups.
        progress: gets a note if there is no verdict.
    """

    def __init__(self, judge: GroupJudge, groups: int, seed: int, progress: Progress) -> None:
        self._judge, self._groups, self._seed, self._progress = judge, groups, seed, progress

    def before_batch(self, rollouts: StepRollouts) -> Extra:
        """Return `judge_agreement` over sampled groups."""
        groups: defaultdict[str, list[Outcome]] = defaultdict(list)
        for outcome in rollouts.outcomes:
            if outcome.attempt is not None and outcome.unjudged is None:  # all that the first judge compared
                groups[outcome.rollout.group_id].append(outcome)
        names = sorted(group for group, its in groups.items() if len(set(judged_scores(its))) > 1)
        chosen = random.Random(f"{self._seed}/{rollouts.step}").sample(names, min(self._groups, len(names)))
        shares = []
        for group in chosen:
            scores = self._judge.scores(groups[group])
            if isinstance(scores, str):
                self._progress.note(f"the second judge gave no verdict on a group: {scores}")
            elif (share := agreement(judged_scores(groups[group]), scores)) is not None:
                shares.append(share)
        return Extra(metrics={AGREEMENT: sum(shares) / len(shares)} if shares else {})


def judged_scores(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the judge's reward of each rollout."""
    return [sum(reward.value for reward in outcome.rewards if reward.source == JUDGE) for outcome in outcomes]


def agreement(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the share of pairs that both prefer in the same order, among those in which the first has a preference.

    Pairs in which the second has no preference count half, so that chance is 0.5.

    Returns:
        None if the first has no preference in any pair.
    """
    pairs = [((b - a), (d - c)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2) if a != b]
    values = [0.5 if other == 0 else float((own > 0) == (other > 0)) for own, other in pairs]
    return sum(values) / len(values) if values else None
