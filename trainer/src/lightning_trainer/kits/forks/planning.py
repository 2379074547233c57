"""Rollouts that fork an earlier attempt. A fork that is not possible is rejected before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Json
from lightning_spans.store import Store
from lightning_trainer.gateway.auth.reward_source import EVALUATOR
from lightning_trainer.gateway.replay.record import Record, RecordedCall, read_record, unanswerable
from lightning_trainer.gateway.replay.session import side_effects_after
from lightning_trainer.rl.rewards.judge import AUTOMATIC
from lightning_trainer.rl.scores import total
from lightning_trainer.runner.target import JUDGE

MODE = "fork"  # mode of the rollouts


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """An attempt that can be forked.

    Attributes:
        record: requests to its models and tools, and their answers.
        task: its task; None if it is not recorded, for example in a trace that no runner made.
        rewards: its rewards.
        status: how it ended; None outside a runner.
        timeout_s: time limit of a try.
    """

    record: Record
    task: Mapping[str, Json] | None
    rewards: tuple[Reward, ...] = field(default=())
    status: str | None = None
    timeout_s: float | None = 300.0

    @property
    def attempt_id(self) -> str:
        """Id of the attempt."""
        return self.record.attempt_id

    @property
    def reward(self) -> float | None:
        """The reward that a fork can earn too. None if there is none."""
        own = [reward for reward in self.rewards if _can_be_earned_again(reward)]
        return total(own) if own else None


def _can_be_earned_again(reward: Reward) -> bool:
    """Whether the program gave it, and not a judge, an automatic reward or an evaluator."""
    given_later = reward.source == JUDGE or reward.source.partition(":")[0] == EVALUATOR
    return not given_later and not reward.reward_id.startswith(AUTOMATIC)


def recorded(store: Store, *, rollout_id: str | None = None, attempt_id: str | None = None) -> RecordedAttempt:
    """Read the attempt to fork.

    Args:
        store: contains it.
        rollout_id: the rollout: its successful attempt is taken, otherwise its last.
        attempt_id: the attempt itself, or the trace of one that no runner made.

    Raises:
        ConfigError: it is not in the store, still runs, or has no model call.
    """
    found = _attempt(store, rollout_id, attempt_id)
    name = attempt_id if found is None else found.attempt_id
    record = read_record(store, str(name))
    if found is None:
        return RecordedAttempt(record, None)
    rewards = tuple(store.rewards(attempt_ids=[found.attempt_id]))
    return RecordedAttempt(record, found.rollout.task, rewards, found.status, found.rollout.timeout_s)


def _attempt(store: Store, rollout_id: str | None, attempt_id: str | None) -> AttemptRecord | None:
    if attempt_id is not None:
        attempts = store.attempts(attempt_ids=[attempt_id])
    else:
        attempts = store.attempts(rollout_ids=[str(rollout_id)])
        if not attempts:
            raise ConfigError(
                f"rollout {rollout_id} is not in the store, or none of its attempts started. Was it deleted?"
                " `lightning-rl traces --store URL` lists what is there."
            )
    ended = [attempt for attempt in attempts if attempt.status != "running"]
    if attempts and not ended:
        raise ConfigError(f"attempt {attempts[-1].attempt_id} still runs. Fork it when it has ended.")
    good = [attempt for attempt in ended if attempt.status == "succeeded"]
    return (good or ended)[-1] if ended else None


def plan(
    recorded: RecordedAttempt,
    *,
    name: str,
    replay: Replay,
    times: int = 1,
    first: int = 0,
    group_id: str | None = None,
    timeout_s: float | None = None,
    tokens: bool = True,
    place: str | None = None,
) -> list[Rollout]:
    """Make the rollouts of a fork: one per alternative. Each has one try: a retry of a fork ends at the same call.

    Args:
        recorded: the attempt to fork.
        name: of the fork; the ids are made from it, so it is unique in the store.
        replay: which call, and how; `draw` and `attempt_id` are filled in here.
        times: number of alternatives.
        first: number of the first: a later plan with other numbers samples other alternatives.
        group_id: of the rollouts; None: made from `name`.
        timeout_s: time limit; None: the recorded rollout's.
        tokens: reject a call without recorded tokens, for when alternatives are compared by them.
        place: part of the ids that separates this fork from others of the same record; None: the number of the call.

    Raises:
        ConfigError: a fork is not possible; the message says why.
    """
    if recorded.task is None:
        raise ConfigError(
            f"attempt {recorded.attempt_id} has no recorded task, because no runner started it. Give its task."
        )
    _check(recorded.record, replay, tokens=tokens)
    whole = replace(replay, attempt_id=recorded.attempt_id)
    place = place or ("all" if replay.call is None else str(replay.call))
    tail = recorded.record.rollout_id.rpartition(":")[2]
    return [
        Rollout(
            rollout_id=f"{name}:{tail}-{place}-{draw}",
            group_id=group_id or f"{name}:{tail}-{place}",
            task=recorded.task,
            mode=MODE,
            max_attempts=1,
            timeout_s=recorded.timeout_s if timeout_s is None else timeout_s,
            replay=replace(whole, draw=draw),
        )
        for draw in range(first, first + times)
    ]


def _check(record: Record, replay: Replay, *, tokens: bool) -> None:
    calls, number = record.calls, replay.call
    if number is None:
        _check_given(calls)
        _check_stand_ins(record, replay)
        return
    if not 0 <= number < len(calls):
        has = "1 call, number 0" if len(calls) == 1 else f"{len(calls)} calls, numbered 0 to {len(calls) - 1}"
        raise ConfigError(f"attempt {record.attempt_id} has {has}: there is no call {number}.")
    fork = calls[number]
    _check_given([call for call in calls if call is not fork and call.node.span.start_ns < fork.ended_ns])
    if not fork.asked.lines:
        raise ConfigError(f"call {number} of attempt {record.attempt_id} can't be matched: its request was not stored.")
    if tokens and not any(choice.token_ids for choice in fork.node.answer.choices):
        raise ConfigError(
            f"call {number} of attempt {record.attempt_id} ({fork.agent or 'no agent'}) "
            "has no recorded tokens, because no policy of a gateway answered it. It can be forked as text, with answers"
            " of another model or endpoint, and can't be trained on."
        )
    if again := side_effects_after(record, number, replay):
        raise ConfigError(
            f"the tool {', '.join(again)} has side effects and ran after call {number}: a fork there might run it"
            f" again. Fork at a later call, or let it run with --run-tools {','.join(again)}."
        )


def _check_stand_ins(record: Record, replay: Replay) -> None:
    """Reject a replay that samples agents' calls again if a tool with side effects might run again."""
    anew = [call.number for call in record.calls if any(selects(replay.fresh, agent) for agent in call.agents)]
    if not anew or replay.tools == "refuse":
        return
    if again := side_effects_after(record, anew[0], replay):
        raise ConfigError(
            f"the tool {', '.join(again)} has side effects and ran after call {anew[0]}, which is sampled again: it"
            " might run again."
        )


def _check_given(calls: Sequence[RecordedCall]) -> None:
    for call in calls:
        why = unanswerable(call)
        if why is not None:
            raise ConfigError(f"call {call.number} ({call.agent or 'no agent'}) can't be replayed: {why}.")
