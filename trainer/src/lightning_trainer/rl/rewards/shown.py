"""The rewards that automatic rules would give to existing attempts, to see them before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_spans import hooks
from lightning_spans.adapter.trace import Trace
from lightning_trainer.rl.rewards.judge import JudgeRule, judge


def with_automatic(traces: Iterable[Trace], rules: Sequence[JudgeRule]) -> list[Trace]:
    """Return the same traces with the rewards of these rules. A reward that a run has stored is not added again."""
    return [_judge_trace(trace, rules) for trace in traces] if rules else list(traces)


def _judge_trace(trace: Trace, rules: Sequence[JudgeRule]) -> Trace:
    transitions = hooks.manager().hook.lightning_adapt(trace=trace) or []
    known = {reward.reward_id for reward in trace.rewards}
    ids = [(transition.rollout_id, transition.attempt_id) for transition in transitions[:1]]
    found = [r for rule in rules for of in ids for r in judge(rule, trace, *of) if r.reward_id not in known]
    return replace(trace, rewards=(*trace.rewards, *found))
