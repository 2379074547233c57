"""The results of a fork: the recorded reward, those of the continuations, and the forks that ended early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.calls import Call
from lightning_spans.schema.replays import FORKED
from lightning_spans.store import Store
from lightning_trainer.gateway.replay.record import read_record
from lightning_trainer.gateway.replay.sessions import why_ended
from lightning_trainer.kits.forks.planning import RecordedAttempt
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import total
from lightning_trainer.rl.told import answer_text

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A fork that continued after the forked call.

    Attributes:
        attempt_id: its attempt.
        reward: its reward; None if the program failed, or gave none.
        answer: answer to the forked call; None if the call failed, or is not recorded.
        error: why the program failed; None if it did not.
    """

    attempt_id: str
    reward: float | None
    answer: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndedFork:
    """A fork that differed from its record before the forked call.

    Attributes:
        attempt_id: its attempt; None if it never began.
        reason: the first difference.
    """

    attempt_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class ForkResult:
    """The results of a fork.

    Attributes:
        recorded: the reward of the recorded attempt, without those of a judge; None if it has none.
        continuations: forks that continued, in the order of their numbers.
        ended: forks that did not reach the forked call, or differed from the record.
    """

    recorded: float | None
    continuations: tuple[Continuation, ...] = field(default=())
    ended: tuple[EndedFork, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl fork --json` prints."""
        return {
            "recorded": self.recorded,
            "continuations": [
                {"attempt_id": each.attempt_id, "reward": each.reward, "answer": each.answer}
                | ({} if each.error is None else {"error": each.error.rpartition("\n")[2]})
                for each in self.continuations
            ],
            "ended": [{"reason": each.reason, "attempt_id": each.attempt_id} for each in self.ended],
        }


def result(store: Store, recorded: RecordedAttempt, outcomes: Sequence[Outcome]) -> ForkResult:
    """Return the results of a fork's rollouts.

    Args:
        store: store in which they ran.
        recorded: the forked attempt.
        outcomes: of the rollouts that `plan` made, as `Local.run` returns them.
    """
    attempts = [outcome.attempts[-1] for outcome in outcomes if outcome.attempts]
    answers: dict[str, str | None] = {}
    reasons: dict[str, str | None] = {}
    calls = store.calls(attempt_ids=[attempt.attempt_id for attempt in attempts]) if attempts else []
    for attempt in attempts:
        own = [call for call in calls if call.attempt_id == attempt.attempt_id]
        forked = next((call for call in own if FORKED in call.sampling and call.choices), None)
        message = forked.choices[0].message if forked is not None else _own_answer(store, recorded, attempt, own)
        answers[attempt.attempt_id] = None if message is None else answer_text(message)
        reasons[attempt.attempt_id] = why_ended(attempt, own)
    went_on, ended = [], []
    for outcome in outcomes:
        last = outcome.attempts[-1] if outcome.attempts else None
        if last is None:
            ended.append(EndedFork(None, outcome.error or "it did not begin"))
        elif (reason := reasons[last.attempt_id]) is not None:
            ended.append(EndedFork(last.attempt_id, reason))
        else:
            reward = total(outcome.rewards) if outcome.attempt is not None and outcome.rewards else None
            error = None if outcome.attempt is not None else last.error or last.status
            went_on.append(Continuation(last.attempt_id, reward, answers[last.attempt_id], error))
    return ForkResult(recorded.reward, tuple(went_on), tuple(ended))


def _own_answer(
    store: Store, recorded: RecordedAttempt, attempt: AttemptRecord, calls: Sequence[Call]
) -> Message | None:
    """Return the answer of the program's own endpoint to the forked call, which only the call's span records."""
    replay = attempt.rollout.replay
    if replay is None or replay.call is None or any(FORKED in call.sampling for call in calls):
        return None
    try:
        made = read_record(store, attempt.attempt_id).calls
    except ConfigError:  # the attempt has no calls
        return None
    fork = recorded.record.calls[replay.call]
    same = (call for call in made if call.asked.key == fork.asked.key and call.agents == fork.agents)
    choices = next((call.node.answer.choices for call in same if call.node.call is None), ())
    return choices[0].message if choices else None
