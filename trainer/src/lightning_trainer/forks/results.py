"""What became of a fork: the recorded reward beside those of the continuations, and the forks that ended early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_spans.schema.replays import FORKED
from lightning_spans.store import Store
from lightning_trainer.forks.planning import Recorded
from lightning_trainer.gateway.replay.sessions import why_ended
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import total


@dataclass(frozen=True, slots=True)
class Continuation:
    """A fork that went on from the forked call.

    Attributes:
        attempt_id: its attempt.
        reward: what it earned; None where the program failed.
        answer: what the forked call said; None where the program's own endpoint answered it.
        error: why the program failed; None where it did not.
    """

    attempt_id: str
    reward: float | None
    answer: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EndedFork:
    """A fork that was not as its record up to the forked call.

    Attributes:
        attempt_id: its attempt; None where it never began.
        reason: the first difference.
    """

    attempt_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class ForkResult:
    """What a fork came to.

    Attributes:
        recorded: the reward of the recorded attempt; None where it has none.
        continuations: that went on, in the order of their numbers.
        ended: that did not come to the forked call, or were not as recorded.
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


def result(store: Store, recorded: Recorded, outcomes: Sequence[Outcome]) -> ForkResult:
    """Say what became of the rollouts of a fork.

    Args:
        store: where they ran.
        recorded: what was forked.
        outcomes: of the rollouts that `plan` made, as `Local.run` returns them.
    """
    attempts = [outcome.attempts[-1] for outcome in outcomes if outcome.attempts]
    answers: dict[str, str | None] = {}
    reasons: dict[str, str | None] = {}
    calls = store.calls(attempt_ids=[attempt.attempt_id for attempt in attempts]) if attempts else []
    for attempt in attempts:
        own = [call for call in calls if call.attempt_id == attempt.attempt_id]
        forked = next((call for call in own if FORKED in call.sampling and call.choices), None)
        answers[attempt.attempt_id] = None if forked is None else _said(forked.choices[0].message)
        reasons[attempt.attempt_id] = why_ended(attempt, own)
    went_on, ended = [], []
    for outcome in outcomes:
        last = outcome.attempts[-1] if outcome.attempts else None
        if last is None:
            ended.append(EndedFork(None, outcome.error or "it did not begin"))
        elif (reason := reasons[last.attempt_id]) is not None:
            ended.append(EndedFork(last.attempt_id, reason))
        else:
            reward = total(outcome.rewards) if outcome.attempt is not None else None
            error = None if outcome.attempt is not None else last.error or last.status
            went_on.append(Continuation(last.attempt_id, reward, answers[last.attempt_id], error))
    reward = total(recorded.rewards) if recorded.rewards else None
    return ForkResult(reward, tuple(went_on), tuple(ended))


def _said(message: Any) -> str:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    texts = [message["content"]] if isinstance(message.get("content"), str) and message["content"] else []
    return "\n".join([*texts, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)])
