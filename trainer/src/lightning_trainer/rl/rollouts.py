"""Rollouts of a batch of tasks: queued in groups, awaited with a limit, and their outcomes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from lightning_spans.errors import LightningError, RewardError
from lightning_spans.record.stalls import Wait, begin
from lightning_spans.schema.attempts import (
    FAILED,
    AttemptRecord,
    End,
    Rollout,
    RolloutStatus,
)
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.states import AttemptState, RolloutState
from lightning_spans.store.traces import traces_of
from lightning_trainer.choices import Timeouts
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.endings import Ending, ending_of, engine_fault, needs_trace

POLL_S: Final = 0.25
SLACK_S: Final = 60.0  # within this time, a runner notices a time-out, ends the attempt and reports it to the store
Failed: TypeAlias = Literal["exclude", "lowest"] | float
"""What a failure of the policy's counts as: left out, the lowest reward of the batch or 0 if that is less, a reward."""
REWARD_ERROR: Final = "RewardError: "  # how the worker's error for an attempt without a usable reward begins


class StalledError(LightningError):
    """Nothing has moved for longer than any attempt may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one rollout.

    Attributes:
        rollout: as it ended.
        attempt: its successful attempt, the last one if there are several; None if none succeeded.
        attempts: all of its attempts in order.
        rewards: of `attempt`; empty without one.
        crash: its first attempt that failed because of the policy, see `endings`; None if none did. If failures count,
            it counts, and no retry replaces it: otherwise a policy that crashes would sample until it wins.
        endings: how each of its attempts ended, by its id.
        unjudged: why the judge gave it no reward; None if it did, or there is no judge. It is left out then.
    """

    rollout: Rollout
    attempt: AttemptRecord | None
    attempts: tuple[AttemptRecord, ...]
    rewards: tuple[Reward, ...] = field(default=())
    crash: AttemptRecord | None = None
    endings: Mapping[str, Ending] = field(default_factory=dict)
    unjudged: str | None = None

    def counts(self, failed: Failed) -> AttemptRecord | None:
        """Return the attempt that counts: the crash, if failures count; None if the rollout is left out."""
        if self.unjudged is not None:
            return None
        return self.attempt if failed == "exclude" or self.crash is None else self.crash

    def without(self, sources: Container[str]) -> Outcome:
        """Return it without the rewards from these sources."""
        return replace(self, rewards=tuple(reward for reward in self.rewards if reward.source not in sources))

    @property
    def ending(self) -> Ending | None:
        """How it ended.

        As its attempt that failed because of the policy, otherwise as its success, otherwise as its last.
        """
        if self.unjudged is not None:
            return Ending.UNJUDGED
        attempt = self.crash or self.attempt or (self.attempts[-1] if self.attempts else None)
        return None if attempt is None else self.endings.get(attempt.attempt_id)

    def why_left_out(self, attempt_id: str) -> str:
        """Return why an attempt does not count, as the account shows it."""
        ending = self.endings.get(attempt_id)
        if self.unjudged is not None and self.attempt is not None and attempt_id == self.attempt.attempt_id:
            return Ending.UNJUDGED.text
        if ending is None:
            return UntrainedReason.ATTEMPT_FAILED
        return UntrainedReason.OTHER_ATTEMPT if ending is Ending.SUCCEEDED else ending.text

    @property
    def error(self) -> str | None:
        """Why it failed; None if it succeeded at once."""
        if self.unjudged is not None:
            return self.unjudged
        if self.crash is not None:
            return self.crash.error
        if self.attempt is not None:
            return None
        errors = [attempt.error for attempt in self.attempts if attempt.error]
        return errors[-1] if errors else f"it was {self.rollout.status} before an attempt started"


def plan(
    tasks: Sequence[Mapping[str, Any]],
    *,
    name: str,
    size: int,
    mode: str,
    max_attempts: int,
    timeout_s: float | None,
    first: int = 0,
) -> list[Rollout]:
    """Create the rollouts of a batch: `size` of each task, in groups.

    Args:
        tasks: a task may be in a batch twice; each position is a group.
        name: of the batch, unique in the store. Ids follow from it, and sampling seeds from the part of an id after the
            colon.
        size: rollouts in a group.
        mode: ``train`` or ``val``.
        max_attempts: tries of each.
        timeout_s: time limit of each try.
        first: position of the first of these tasks in the batch.
    """
    return [
        Rollout(
            rollout_id=f"{name}-{place}-{member}",
            group_id=f"{name}-{place}",
            task=task,
            mode=mode,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
        )
        for place, task in enumerate(tasks, first)
        for member in range(size)
    ]


def wait(
    store: Store,
    rollouts: Sequence[Rollout],
    *,
    check: Callable[[], None],
    describe: Callable[[], str],
    on_progress: Callable[[int], None],
    ended: Callable[[], int] = lambda: 0,
    poll_s: float = POLL_S,
) -> None:
    """Wait until all these rollouts have ended.

    Args:
        store: where they were queued.
        rollouts: all of a batch.
        check: raises when nothing will run them any more.
        describe: describes what the workers do.
        on_progress: called with the number of ended rollouts, whenever it has changed.
        ended: returns the number of attempts that the workers have ended, of all rollouts. While others that were
            queued before these end, nothing stalls.
        poll_s: seconds between checks.

    Raises:
        RewardError: an attempt gave no usable reward, and no retry will.
        StalledError: no rollout has started or ended for longer than an attempt may take.
    """
    tasks = {rollout.rollout_id: rollout.task for rollout in rollouts}
    where = Where(rollout_ids=list(tasks))
    limit_s = max((rollout.timeout_s or 0.0 for rollout in rollouts), default=0.0) + SLACK_S
    untimed = any(rollout.timeout_s is None for rollout in rollouts)
    seen: object = None
    since = time.monotonic()
    with _Stalls(describe) as stalls:
        while True:
            check()
            now = whole_list(store, RolloutState, where)
            standing: Counter[RolloutStatus] = Counter(rollout.status for rollout in now)
            attempts = whole_list(store, AttemptState, where)
            _refuse_missing_rewards(attempts, tasks)
            moved = (standing, Counter(attempt.status for attempt in attempts), ended())
            if moved != seen:
                seen, since = moved, time.monotonic()
                on_progress(len(tasks) - standing["queued"] - standing["running"])
            if not standing["queued"] and not standing["running"]:
                return
            stalls.look(now, attempts, moved)
            if time.monotonic() - since > limit_s and not untimed:
                raise StalledError(_stall_message(attempts, standing, limit_s, describe()))
            time.sleep(poll_s)


def outcomes(store: Store, rollouts: Sequence[Rollout], timeouts: Timeouts = "count") -> list[Outcome]:
    """Return the outcomes of rollouts that have ended, in order.

    Args:
        store: where they were run.
        rollouts: they have ended.
        timeouts: ``exclude``: an attempt that was too slow is not the policy's failure.
    """
    ids = [rollout.rollout_id for rollout in rollouts]
    ended = {rollout.rollout_id: rollout for rollout in store.rollouts(rollout_ids=ids)}
    attempts: dict[str, list[AttemptRecord]] = defaultdict(list)
    for attempt in store.attempts(rollout_ids=ids):
        attempts[attempt.rollout.rollout_id].append(attempt)
    rewards: dict[str, list[Reward]] = defaultdict(list)
    for reward in store.rewards(rollout_ids=ids):
        rewards[reward.attempt_id].append(reward)
    endings = _endings(store, [attempt for its in attempts.values() for attempt in its])
    return [_outcome(ended[i], sorted(attempts[i], key=lambda a: a.number), rewards, endings, timeouts) for i in ids]


def settle_end(store: Store, end: End, *, lost_answers: bool, timeouts: Timeouts, failed: Failed) -> End:
    """Return the end of an attempt as it counts.

    A result that misses an answer of its engine becomes a failure, which is tried again. A failure of the policy that
    counts becomes final, whatever a retry would do.

    Args:
        store: with its calls.
        end: how it is about to end.
        lost_answers: whether a call failed or was cut, and its engine may be to blame.
        timeouts: how rollouts that were too slow count.
        failed: what failures count as.
    """
    if end.status == "succeeded":
        traces = traces_of(store, attempt_ids=[end.attempt_id]) if lost_answers else []
        faults = [fault for trace in traces if (fault := engine_fault(trace)) is not None]
        return replace(end, status="failed", rewards=(), error=faults[0]) if faults else end
    return replace(end, final=_is_counted(store, end, timeouts, failed))


def _is_counted(store: Store, end: End, timeouts: Timeouts, failed: Failed) -> bool:
    """Whether an end is a failure of the policy that counts."""
    if failed == "exclude" or end.status not in FAILED:
        return False
    ended = [replace(one, status=end.status, error=end.error) for one in store.attempts(attempt_ids=[end.attempt_id])]
    return any(ending.is_policys(timeouts) for ending in _endings(store, ended).values())


def _endings(store: Store, attempts: Sequence[AttemptRecord]) -> dict[str, Ending]:
    """Classify how attempts ended, by id; failed ones with the information in their calls."""
    looked = sorted(attempt.attempt_id for attempt in attempts if needs_trace(attempt))
    traces = {trace.attempt_id: trace for trace in traces_of(store, attempt_ids=looked)} if looked else {}
    ended = (attempt for attempt in attempts if attempt.status != "running")
    return {attempt.attempt_id: ending_of(attempt, traces.get(attempt.attempt_id)) for attempt in ended}


def _outcome(
    rollout: Rollout,
    attempts: list[AttemptRecord],
    rewards: Mapping[str, list[Reward]],
    endings: Mapping[str, Ending],
    timeouts: Timeouts,
) -> Outcome:
    its = {attempt.attempt_id: endings[attempt.attempt_id] for attempt in attempts if attempt.attempt_id in endings}
    good = [attempt for attempt in attempts if attempt.status == "succeeded"]
    attempt = good[-1] if good else None
    earned = tuple(rewards.get(attempt.attempt_id, ())) if attempt is not None else ()
    policys = {attempt_id for attempt_id, ending in its.items() if ending.is_policys(timeouts)}
    crash = next((attempt for attempt in attempts if attempt.attempt_id in policys), None)
    return Outcome(rollout=rollout, attempt=attempt, attempts=tuple(attempts), rewards=earned, crash=crash, endings=its)


def _refuse_missing_rewards(attempts: Sequence[AttemptState], tasks: Mapping[str, Mapping[str, Any]]) -> None:
    for attempt in attempts:
        if attempt.status == "failed" and (attempt.error or "").startswith(REWARD_ERROR):
            problem = (attempt.error or "").removeprefix(REWARD_ERROR)
            raise RewardError(f"{problem}\nThe task was {str(dict(tasks[attempt.rollout_id]))[:300]}.")


def _stall_message(
    attempts: Sequence[AttemptState], standing: Mapping[RolloutStatus, int], limit_s: float, workers: str
) -> str:
    running = [attempt for attempt in attempts if attempt.status == "running"]
    oldest = min(running, key=lambda a: a.started_ns, default=None)
    what = f"{standing['queued']} rollouts wait and {standing['running']} run"
    which = f" The oldest is attempt {oldest.attempt_id}, claimed by {oldest.worker}." if oldest else ""
    return (
        f"no rollout has started or ended for {limit_s:.0f} s, longer than an attempt may take: {what}.{which}\n"
        f"{workers}\nLook into the workers' logs; is the agent waiting for something that never comes?"
    )


class _Stalls:
    """Names what a batch waits for while nothing moves.

    A claim, a runner that has gone, the last rollouts of its groups.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._waits: dict[str, Wait] = {}
        self._seen: object = None

    def __enter__(self) -> _Stalls:
        return self

    def __exit__(self, *exc: object) -> None:
        for wait in self._waits.values():
            wait.end()

    def look(self, rollouts: Sequence[RolloutState], attempts: Sequence[AttemptState], moved: object) -> None:
        """Note the current state of the batch."""
        if moved != self._seen:
            self._seen = moved
            for wait in self._waits.values():
                wait.moved()
        told = self._describe
        queued = {rollout.rollout_id for rollout in rollouts if rollout.status == "queued"}
        idle = bool(queued) and not any(attempt.status == "running" for attempt in attempts)
        gone = [a for a in attempts if a.status == "lost" and a.rollout_id in queued]
        last = _last_of_groups(rollouts)
        self._note("queue", idle and not gone, lambda: f"a runner to claim {len(queued)} rollouts; {told()}")
        self._note("lease", idle and bool(gone), lambda: f"another runner to take over {_attempts_text(gone)}")
        self._note("group", bool(last), lambda: f"the last of their groups: {', '.join(last[:4])}; {told()}")

    def _note(self, part: str, stands: bool, what: Callable[[], str]) -> None:
        if not stands:
            if (wait := self._waits.pop(part, None)) is not None:
                wait.end()
        elif part not in self._waits:
            self._waits[part] = begin(part, what)


def _attempts_text(gone: Sequence[AttemptState]) -> str:
    return f"{len(gone)} attempts, such as {gone[0].attempt_id}, claimed by {gone[0].worker}"


def _last_of_groups(rollouts: Sequence[RolloutState]) -> list[str]:
    """Name the rollouts that have not ended, if they are a quarter of each group or fewer."""
    groups: dict[str, list[RolloutState]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    left = [[r.rollout_id for r in group if r.status in {"queued", "running"}] for group in groups.values()]
    few = all(len(some) <= max(1, len(group) // 4) for some, group in zip(left, groups.values(), strict=True))
    return [rollout for some in left for rollout in some] if few else []
