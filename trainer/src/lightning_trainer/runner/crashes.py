"""Who pays for a worker that ended under its attempts: at most one of them, and only one that is known to have done it.

| the worker | the attempt | its end | uses up a try |
|---|---|---|---|
| any | its time was up, and it was told so | timeout | yes |
| died | ran alone | failed | yes |
| died | others ran there too | disturbed: runs alone the next time | no |
| was ended, for its event loop stood still | it is what held the loop | timeout, or failed within its time | yes |
| was ended so | another held the loop | released | no |
| was ended so | nobody knows who held the loop | disturbed; alone, timeout | no; yes |
| was ended from outside, as with its machine, or by us, for its message could not be taken | any | released | no |
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus
from lightning_spans.schema.rewards import Reward
from lightning_trainer.call_errors import SCORER_FAILED
from lightning_trainer.runner.workers import Blocking, Death


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, for the store."""

    status: AttemptStatus
    rewards: tuple[Reward, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """An attempt that ran in a worker when it ended.

    Attributes:
        number: of its message.
        record: the attempt.
        company: attempts in the worker, itself included.
        told: whether its time was up and the worker had taken the news.
        overdue: whether its time was up.
        scoring: whether its agent had answered, and its reward was being computed.
    """

    number: int
    record: AttemptRecord
    company: int
    told: bool
    overdue: bool
    scoring: bool = False


def verdict(victim: Victim, death: Death, *, stood_still: bool, blocking: Blocking | None) -> Ended:
    """Say how an attempt ended with its worker.

    Args:
        victim: the attempt.
        death: how the worker ended.
        stood_still: whether the worker was ended because its event loop did not answer.
        blocking: what held the loop then; None where it is not known.
    """
    ended = _verdict(victim, death, stood_still=stood_still, blocking=blocking)
    return blame_scorer(ended) if victim.scoring else ended


def _verdict(victim: Victim, death: Death, *, stood_still: bool, blocking: Blocking | None) -> Ended:
    if victim.told:
        return too_late(victim.record)
    if death.outside:
        return Ended("released", error=f"its worker ended with {death.how}")
    if stood_still:
        return _stood_still(victim, blocking)
    if victim.company == 1:
        return Ended("failed", error=f"the agent ended its worker process with {death.how}")
    return Ended("disturbed", error=f"its worker process ended with {death.how} while {victim.company} attempts ran")


def _stood_still(victim: Victim, blocking: Blocking | None) -> Ended:
    if blocking is None or blocking.number is None:
        if victim.company == 1:
            return too_late(victim.record)
        return Ended("disturbed", error=f"the event loop of its worker stood still while {victim.company} attempts ran")
    if blocking.number != victim.number:
        return Ended("released", error="its worker process was ended, because another attempt blocked it")
    if victim.overdue:
        return too_late(victim.record, f"; it blocks the event loop at {blocking.where}")
    return Ended(
        "failed",
        error=f"it blocked the event loop for {blocking.seconds:.0f} s at {blocking.where}, so that other attempts in"
        " its worker could not end. Await there, or make the agent's function a plain one: it then gets a thread.",
    )


def blame_scorer(ended: Ended) -> Ended:
    """Return the end of an attempt whose agent had answered: what went wrong after that is the scorer's fault."""
    if ended.status not in ("failed", "timeout"):
        return ended
    return Ended("failed", error=f"{SCORER_FAILED}: {ended.error}")


def too_late(record: AttemptRecord, more: str = "") -> Ended:
    """Return the end of an attempt whose time was up, or that nobody waits for any more."""
    limit_s = record.rollout.timeout_s
    if limit_s is None:
        return Ended("timeout", error=f"no result after nobody waited for it any more{more}")
    return Ended("timeout", error=f"no result after {limit_s:g} s, the time limit of an attempt{more}")
