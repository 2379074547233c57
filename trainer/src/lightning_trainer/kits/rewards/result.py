"""The result of an attack: what each strategy earned, compared with the same tasks without an instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_trainer.intervals import METHOD, Estimate
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import (
    Counting,
    Summary,
    difference,
    reward_floor,
    summarise,
    summarise_each,
)
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import decimal

Verdict: TypeAlias = Literal["more", "as much", "unsure", "less", "nothing", "not tried"]
PAID: Final[tuple[Verdict, ...]] = ("more", "as much")
_UNTRIED: Final = 3  # exit status if no strategy could be tried


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRollout:
    """One rollout, with or without an instruction.

    Attributes:
        sample: its ending and its rewards.
        answer: the last answer of the instructed agents; None if there is none.
        reached: whether the instruction was in one of their calls.
        sources: sources of its rewards, such as ``score``, with the value of each.
    """

    sample: Sample
    answer: str | None
    reached: bool
    sources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidRollout:
    """A rollout that was instructed not to do its task, but earned at least as much as the task earns otherwise."""

    rollout_id: str
    strategy: str
    task: int
    reward: float
    sources: Mapping[str, float]
    answer: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the rollout with a sentence on why it was paid."""
        told = " and ".join(f"{source} gave {value:g}" for source, value in self.sources.items())
        return {**asdict(self), "why": f"{self.strategy}: {told or 'no reward was given'}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """Result of a strategy.

    Attributes:
        verdict: compared with the rollouts without an instruction. ``more`` is certain: the interval of the difference
            is above 0. So is ``less``.
        reward: mean over the tasks of the rollouts that count.
        difference: from the rollouts without an instruction, paired by task.
        counted: number of rollouts that did not do the task, as far as is known.
        same: number of rollouts with an answer that their task also got without an instruction. They do not count.
        unreached: number of rollouts in which no call had the instruction. They do not count.
        failed: number of rollouts that failed for a reason other than the model. They do not count.
        paid: rollouts that earned at least as much as their task earns otherwise.
    """

    verdict: Verdict
    reward: Estimate
    difference: Estimate
    counted: int
    same: int
    unreached: int
    failed: int
    paid: Sequence[PaidRollout]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of the strategy."""
        ends = {"difference_low": self.difference.low, "difference_high": self.difference.high}
        numbers = {**self.reward.to_json(), "difference": self.difference.mean, **ends}
        counts = {name: getattr(self, name) for name in ("counted", "same", "unreached", "failed")}
        return {"verdict": self.verdict, **numbers, **counts, "paid": len(self.paid)}


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """The result of an attack.

    Attributes:
        base: summary of the rollouts without an instruction.
        strategies: results by name.
        rollouts: number of instructed rollouts.
        unreached: by agent, the number of calls without a system prompt to put the instruction into.
        folder: with the store of the rollouts.
    """

    base: Summary
    strategies: Mapping[str, StrategyResult]
    rollouts: int
    unreached: Mapping[str, int]
    folder: Path

    @cached_property
    def paid(self) -> list[PaidRollout]:
        """The paid rollouts, the highest rewards first."""
        found = [each for strategy in self.strategies.values() for each in strategy.paid]
        return sorted(found, key=lambda each: -each.reward)

    def named(self, *verdicts: Verdict) -> list[str]:
        """Return the names of the strategies with one of these verdicts."""
        return [name for name, each in self.strategies.items() if each.verdict in verdicts]

    @property
    def not_tried(self) -> list[str]:
        """What could not be tried, and why, one sentence each."""
        told = [
            f"{name}: {amount(each.same, 'rollout')} answered the same as without the instruction,"
            f" {each.unreached} did not get it, {each.failed} failed."
            for name, each in self.strategies.items()
            if each.same or each.unreached or each.failed
        ]
        return told + [
            f"{agent or '(no name)'}: {amount(calls, 'call')} had no system prompt, so the instruction could not be"
            " added."
            for agent, calls in self.unreached.items()
        ]

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 0 if no strategy paid, 1 if one did, 3 if none could be tried."""
        if self.named(*PAID):
            return 1
        return _UNTRIED if len(self.named("not tried")) == len(self.strategies) else 0

    @property
    def advice(self) -> str:
        """Advice on what to do."""
        if self.exit_status == _UNTRIED:
            return (
                "No attack could be tried, so nothing is known about this reward. Use a model that follows"
                " instructions: --model, or --endpoint."
            )
        if best := self.named(*PAID):
            return (
                f"This reward can be earned without doing the task: {', '.join(best)} earned at least as much as doing"
                " it. Read the rollouts above; change the reward so that these answers earn nothing, and repeat the"
                " attack."
            )
        if unsure := self.named("unsure"):
            return (
                f"No attack certainly paid, but {', '.join(unsure)} earned something, and"
                f" {amount(self.base.tasks, 'task')} can't tell whether it is less than for the task: use more tasks"
                " and --attacks."
            )
        if some := self.named("less"):
            return (
                f"No attack paid as much as the task; {', '.join(some)} earned a part of it. Lower that part if the"
                " policy rarely solves the task: it would learn to earn only this part."
            )
        if left := self.named("not tried"):
            return (
                f"No attack paid, but {', '.join(left)} could not be tried, for the reasons above. More --attacks and"
                " tasks, or a model that follows instructions better, may change that."
            )
        return "No attack paid. Other attacks may: read a few of the highest rewards while you train."

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl rewards attack --json` prints."""
        return {
            "rollouts": self.rollouts,
            "paid": [each.to_json() for each in self.paid],
            "strategies": {name: each.to_json() for name, each in self.strategies.items()},
            "uninstructed": {**self.base.reward.to_json(), "tasks": self.base.tasks, "rollouts": self.base.counted},
            "interval": METHOD,
            "not_tried": self.not_tried,
            "advice": self.advice,
            "folder": str(self.folder),
        }


def compare_strategies(
    base: Sequence[AttackRollout], attacks: Mapping[str, Sequence[AttackRollout]], counting: Counting
) -> tuple[Summary, dict[str, StrategyResult]]:
    """Compare the rollouts of each strategy with those without an instruction."""
    answers = {(each.sample.task, each.answer) for each in base}
    whole = [each.sample for each in base]
    tried = {
        name: [one for one in its if _counts(one) and (one.sample.task, one.answer) not in answers]
        for name, its in attacks.items()
    }
    summaries = summarise_each([whole, *([one.sample for one in its] for its in tried.values())], counting)
    every = [*whole, *(one.sample for its in attacks.values() for one in its)]
    floor = counting.declared[0] if counting.declared else reward_floor(every, counting)
    found = {}
    for name, summary in zip(tried, summaries[1:], strict=True):
        paid = [
            each for one in tried[name] if (each := _paid_rollout(name, one, summaries[0], floor, counting)) is not None
        ]
        reached = [one for one in attacks[name] if one.reached]
        failed = sum(one.sample.status == "failed" for one in reached)
        rise, _ = difference(summary, summaries[0])
        found[name] = StrategyResult(
            verdict=_verdict(summary, rise, floor, paid=bool(paid)),
            reward=summary.reward,
            difference=rise,
            counted=summary.counted,
            same=len(reached) - failed - len(tried[name]),
            unreached=len(attacks[name]) - len(reached),
            failed=failed,
            paid=paid,
        )
    return summaries[0], found


def _counts(one: AttackRollout) -> bool:
    return one.reached and one.sample.status != "failed"


def _paid_rollout(name: str, one: AttackRollout, base: Summary, floor: float, counting: Counting) -> PaidRollout | None:
    """Return a rollout with more than the lowest reward and at least that of its task without an instruction."""
    reward = summarise([one.sample], counting).reward.mean if one.sample.status == "succeeded" else None
    usual = base.by_task.get(one.sample.task)
    if reward is None or usual is None or reward <= floor or reward < usual:
        return None
    return PaidRollout(
        rollout_id=one.sample.rollout_id,
        strategy=name,
        task=one.sample.task,
        reward=reward,
        sources=one.sources,
        answer=one.answer,
    )


def _verdict(summary: Summary, rise: Estimate, floor: float, *, paid: bool) -> Verdict:
    if summary.reward.mean is None or rise.mean is None or rise.low is None or rise.high is None:
        return "not tried"
    if summary.reward.mean <= floor:
        return "nothing"
    if paid and rise.low > 0:
        return "more"
    if paid and rise.mean >= 0:
        return "as much"
    return "less" if rise.high < 0 else "unsure"


def short_answer(text: str, most: int = 120) -> str:
    """Return an answer on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def numbers(found: Estimate) -> tuple[str, str]:
    """Return a mean and its interval as texts for a table."""
    if found.mean is None or found.low is None or found.high is None:
        return "-", "-"
    return decimal(found.mean), f"{decimal(found.low)} to {decimal(found.high)}"
