"""Policies with their own weights: their held-out rewards, their best weights and returns to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.view.answers.runs import PolicyRow, Rollback
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.policies import parse
from lightning_trainer.report.log.lines import Line
from lightning_trainer.report.teams.cliffs import mean_rewards, rewarded_names
from lightning_trainer.rl.scores import BY_TASK
from lightning_trainer.run.cliffs import BEST_WEIGHTS, ROLLBACK


def policies_of(run: Run, lines: Sequence[Line], validations: Sequence[Line]) -> list[PolicyRow]:
    """Return the policies whose best weights the run saves separately, and those that were rolled back.

    Args:
        run: the run.
        lines: of its log.
        validations: the comparable validations among them.
    """
    rollbacks = defaultdict[str, list[Rollback]](list)
    for line in lines:
        if line["kind"] == ROLLBACK and isinstance(line.get("to_step"), int):
            rollbacks[str(line.get("policy"))].append(Rollback(after=line["step"], to_step=line["to_step"]))
    names = _names_by_policy(run, validations)
    names |= {policy: [""] for policy in rollbacks if policy not in names}
    return [_row(run, policy, its, validations, rollbacks[policy]) for policy, its in names.items()]


def _names_by_policy(run: Run, validations: Sequence[Line]) -> dict[str, list[str]]:
    """Return for each trained policy the agents whose rewards are its own."""
    chosen = run.options.get("policies")
    if not isinstance(chosen, Mapping) or not validations:
        return {}
    try:
        policies = parse({str(agent): str(policy) for agent, policy in chosen.items()})
    except ConfigError:
        return {}
    trained = [policy for policy in policies.adapters if policy not in policies.fixed]
    answered = {agent: policies.of(agent) for agent in validations[-1].get(BY_TASK, {}) if agent}
    policy_of = {agent: policy for agent, policy in answered.items() if policy in trained}
    return {policy: [""] for policy in trained} | rewarded_names(validations, policy_of)


def _row(run: Run, policy: str, names: list[str], validations: Sequence[Line], rollbacks: list[Rollback]) -> PolicyRow:
    points = mean_rewards(validations, names)
    best_step, best = max(points, key=lambda point: point[1], default=(None, None))
    folder = f"{BEST_WEIGHTS}/{policy}"
    return PolicyRow(
        policy=policy,
        agents=[name for name in names if name],
        points=points,
        best_step=best_step,
        best=best,
        last=points[-1][1] if points else None,
        folder=folder if run.folder and (run.folder / folder).is_dir() else None,
        rollbacks=rollbacks,
    )
