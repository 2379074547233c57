"""What automatic rules would give to attempts that are there already: to see it before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_spans import hooks
from lightning_spans.adapter.trace import Trace
from lightning_trainer.rl.rewards.judge import Judge, JudgeRule


def with_automatic(traces: Iterable[Trace], rules: Sequence[JudgeRule]) -> list[Trace]:
    """Return the same traces with the rewards of these rules; a reward that a run has kept is not given twice."""
    return [_judged(trace, Judge(rules)) for trace in traces] if rules else list(traces)


def _judged(trace: Trace, judge: Judge) -> Trace:
    transitions = hooks.manager().hook.lightning_adapt(trace=trace) or []
    known = {reward.reward_id for reward in trace.rewards}
    found = [r for r in judge.lightning_rewards(trace, transitions) if r.reward_id not in known]
    return replace(trace, rewards=(*trace.rewards, *found))
