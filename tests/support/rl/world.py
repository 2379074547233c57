"""A store with attempts whose calls, tokens and rewards a test states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.replays import REPLAYED, Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, Span
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.comparison import Penalty
from lightning_trainer.rl.rollouts import Outcome

Said = tuple[str | None, str]  # agent, what it answered; "" for a call that the gateway did not see


class World:
    """Attempts made by hand: what each agent said, and what it earned."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._traces: dict[str, Trace] = {}

    def rollout(
        self,
        group: str,
        said: Sequence[Said],
        rewards: dict[str | None, float] | None = None,
        *,
        failed_before: Sequence[Said] | None = None,
        replays: tuple[str, int] | None = None,
    ) -> None:
        number = len(self.outcomes)
        replay = None if replays is None else Replay(attempt_id=replays[0], call=replays[1])
        rollout = Rollout(rollout_id=f"r{number}", group_id=group, task={}, replay=replay)
        attempts = []
        if failed_before is not None:
            attempts.append(self._attempt(rollout, 1, "failed", failed_before, ()))
        status = "failed" if rewards is None else "succeeded"
        attempt_id = f"r{number}.{len(attempts) + 1}"
        earned = tuple(
            Reward(rollout_id=rollout.rollout_id, attempt_id=attempt_id, agent=agent, value=value)
            for agent, value in (rewards or {}).items()
        )
        attempts.append(self._attempt(rollout, len(attempts) + 1, status, said, earned))
        good = attempts[-1] if rewards is not None else None
        crash = attempts[0] if attempts[0].status == "failed" else None
        self.outcomes.append(
            Outcome(rollout=rollout, attempt=good, attempts=tuple(attempts), rewards=earned, crash=crash)
        )

    def _attempt(
        self, rollout: Rollout, number: int, status: Any, said: Sequence[Said], rewards: Sequence[Reward]
    ) -> AttemptRecord:
        attempt_id = f"{rollout.rollout_id}.{number}"
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt_id}
        trace_id = f"{abs(hash(attempt_id)):032x}"[:32]
        spans, calls = [], []
        given = 0 if rollout.replay is None else rollout.replay.call or 0  # calls that its record answered
        for turn, (agent, answer) in enumerate(said, 1):
            key = {"trace_id": trace_id, "span_id": f"{turn:016x}"}
            spans.append(
                Span(operation=CHAT, name="m", start_ns=turn, end_ns=turn, agent=agent, status="ok", **key, **ids)
            )
            if answer:
                tokens = tuple(answer.encode())
                choice = Choice(0, tokens, (-0.5,) * len(tokens), "stop")
                calls.append(
                    Call(
                        call_id=f"{attempt_id}/{turn}",
                        response_id=f"{attempt_id}/{turn}",
                        start_ns=turn,
                        end_ns=turn,
                        policy="policy",
                        policy_version=0,
                        prompt_token_ids=(turn, 7),
                        sampling={REPLAYED: "an earlier one"} if turn <= given else {},
                        choices=(choice,),
                        **key,
                        **ids,
                    )
                )
        self._traces[attempt_id] = Trace.build(spans, calls, rewards, **ids)
        return AttemptRecord(attempt_id=attempt_id, rollout=rollout, number=number, fence=1, worker="w", status=status)

    def traces(self, attempt_ids: Sequence[str]) -> list[Trace]:
        return [self._traces[i] for i in attempt_ids]

    def batch(
        self, known_agents: Sequence[str] = (), *, whole: bool = True, penalty: Penalty | None = None, **options: Any
    ) -> Batch:
        config = options_of(**{"failed": "exclude", **options})
        algorithm = algorithm_by_name(config.algorithm)
        return algorithm.batch(config, self.outcomes, self.traces, known_agents, whole=whole, penalty=penalty)


def options_of(**options: Any) -> TrainConfig:
    return TrainConfig(**{"target": "a:b", "data": "x.jsonl", "model": "m", **options})
