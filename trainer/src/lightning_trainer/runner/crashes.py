"""Which attempt pays for a worker that ended: at most one, and only one that is known to have caused it.

| the worker | the attempt | its end | uses up a try |
|---|---|---|---|
| any | its time was up, and it was told so | timeout | yes |
| died | ran alone | failed | yes |
| was killed (SIGKILL, SIGTERM), for example when memory ran out | ran alone, the first time | disturbed | no |
| died | others ran there too | disturbed: runs alone the next time | no |
| was killed because its event loop was blocked | it blocked the loop, past its time | timeout | yes |
| likewise | it blocked the loop within its time, while others waited | disturbed | no |
| likewise | another blocked the loop | released | no |
| likewise | it is unknown which one blocked the loop | disturbed; alone past its time, timeout | no; yes |
| ended from outside, such as with its machine, or was killed because its message was unusable | any | released | no |
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus
from lightning_spans.schema.rewards import Reward
from lightning_trainer.reasons.call_errors import SCORER_FAILED
from lightning_trainer.runner.workers import Blocking, Death


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt, for the store."""

    status: AttemptStatus
    rewards: tuple[Reward, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """An attempt that was running in a worker when the worker ended.

    Attributes:
        number: number of its message.
        record: the attempt.
        company: number of attempts in the worker, itself included.
        told: whether its time was up and the worker had received the cancellation.
        overdue: whether its time was up.
        scoring: whether its agent had answered, and its reward was being computed.
    """

    number: int
    record: AttemptRecord
    company: int
    told: bool
    overdue: bool
    scoring: bool = False


def verdict(victim: Victim, death: Death, *, stood_still: bool, blocking: Blocking | None) -> AttemptEnd:
    """Return how an attempt ended with its worker.

    Args:
        victim: the attempt.
        death: how the worker ended.
        stood_still: whether the worker was killed because its event loop did not answer.
        blocking: what blocked the loop then; None if unknown.
    """
    ended = _verdict(victim, death, stood_still=stood_still, blocking=blocking)
    return blame_scorer(ended) if victim.scoring else ended


def _verdict(victim: Victim, death: Death, *, stood_still: bool, blocking: Blocking | None) -> AttemptEnd:
    if victim.told:
        return too_late(victim.record)
    if death.outside:
        return AttemptEnd("released", error=f"its worker ended with {death.how}")
    if stood_still:
        return _stood_still(victim, blocking)
    if victim.company > 1:
        return AttemptEnd(
            "disturbed", error=f"its worker process ended with {death.how} while {victim.company} attempts ran"
        )
    if death.killed:
        return killed_attempt_end(victim.record, "its worker process", f"it ended with {death.how}")
    return AttemptEnd("failed", error=f"the agent ended its worker process with {death.how}")


def killed_attempt_end(record: AttemptRecord, what: str, told: str) -> AttemptEnd:
    """Return the end of an attempt that ran alone when the system or a user killed it.

    Linux does so when memory runs out, whichever process used it, and a service manager when it stops a runner. Only if
    it happens again to the same attempt is the attempt considered the cause.

    Args:
        record: the attempt.
        what: what was killed.
        told: what is known of its end, such as the signal.
    """
    if not record.disturbed:
        return AttemptEnd(
            "disturbed",
            error=f"{what} was killed, perhaps because memory ran out or its service was stopped; the attempt runs"
            f" once more:\n{told}",
        )
    return AttemptEnd(
        "failed",
        error=f"{what} was killed again while the attempt ran alone. If it needs too much memory, the kernel's log says"
        f" so (dmesg):\n{told}",
    )


def _stood_still(victim: Victim, blocking: Blocking | None) -> AttemptEnd:
    holder = None if blocking is None else blocking.number
    if holder is not None and holder != victim.number:
        return AttemptEnd("released", error="its worker process was ended, because another attempt blocked it")
    where = "" if blocking is None or holder is None else f"; it blocks the event loop at {blocking.where}"
    if victim.overdue and (holder is not None or victim.company == 1):
        return too_late(victim.record, where)
    if blocking is None or holder is None:
        return AttemptEnd(
            "disturbed", error=f"the event loop of its worker stood still while {victim.company} attempts ran"
        )
    return AttemptEnd(
        "disturbed",
        error=f"it blocked the event loop for {blocking.seconds:.0f} s at {blocking.where}, so that other attempts in"
        " its worker had to wait: "
        "it runs again alone. Await that call, or make the agent's function synchronous: it then runs in a thread.",
    )


def blame_scorer(ended: AttemptEnd) -> AttemptEnd:
    """Return the end of an attempt whose agent had answered: a later failure is the scorer's fault."""
    if ended.status not in ("failed", "timeout"):
        return ended
    return AttemptEnd("failed", error=f"{SCORER_FAILED}: {ended.error}")


def too_late(record: AttemptRecord, more: str = "") -> AttemptEnd:
    """Return the end of an attempt whose time was up, or that nobody waits for any more."""
    limit_s = record.rollout.timeout_s
    if limit_s is None:
        return AttemptEnd("timeout", error=f"no result, and nothing was waiting for it any more{more}")
    return AttemptEnd("timeout", error=f"no result after {limit_s:g} s, the time limit of an attempt{more}")
