"""The result of a run at a glance: one sentence, the held-out rewards of each agent, and the cost."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_trainer.intervals import Declared, Estimate, estimate_mean, reward_bounds
from lightning_trainer.kits.view.answers.runs import Headline, HeldOut, HeldOutPoint, RunCost, StepRow
from lightning_trainer.kits.view.names import chosen_by
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.models import BEST
from lightning_trainer.report.log.lines import Line
from lightning_trainer.report.metrics import best_step, newest_validations
from lightning_trainer.report.step_notes import held_out_sentence
from lightning_trainer.report.terminal import decimal
from lightning_trainer.rl.scores import Score, difference, trained_names


def headline_of(run: Run, lines: Sequence[Line], steps: Sequence[StepRow]) -> Headline:
    """Return the result of a run.

    Args:
        run: the run.
        lines: of its log.
        steps: steps in its store.
    """
    validations = [line for line in newest_validations(lines) if "rollouts" in line]
    held_out = _held_out(validations, chosen_by(run), run.declared)
    best = best_step(validations)
    points = held_out[0].points if held_out else []
    return Headline(
        sentence=_sentence(validations, lines, steps, run.declared),
        held_out=held_out,
        best=next((point for point in points if point.step == best), None),
        best_folder=_best_folder(run, best),
        cost=_cost(lines),
    )


def _best_folder(run: Run, best: int | None) -> str | None:
    return BEST if run.folder and best and (run.folder / BEST).is_dir() else None


def _held_out(validations: Sequence[Line], chosen: Sequence[str] | None, declared: Declared) -> list[HeldOut]:
    scores = [(int(line["step"]), Score.from_metrics(line, declared)) for line in validations]
    agents = list(dict.fromkeys(name for _, score in scores for name in score.by_agent))
    trained = trained_names(agents, chosen)
    found = [_of_agent(name, scores, trained is None or name in ("", *trained)) for name in ("", *sorted(agents))]
    return [each for each in found if each.points]


def _of_agent(agent: str, scores: Sequence[tuple[int, Score]], trained: bool) -> HeldOut:
    points = [(step, _estimate(score, agent)) for step, score in scores]
    rise, tasks = difference(scores[-1][1], scores[0][1], agent) if len(scores) > 1 else (Estimate(None), 0)
    return HeldOut(
        agent=agent,
        trained=trained,
        points=[
            HeldOutPoint(step=step, mean=found.mean, low=found.low, high=found.high)
            for step, found in points
            if found.mean is not None
        ],
        difference=rise.mean,
        low=rise.low,
        high=rise.high,
        tasks=tasks,
    )


def _estimate(score: Score, agent: str) -> Estimate:
    """Return the mean reward of an agent; "" stands for the trained agents: their interval is in the log."""
    if not agent:
        return Estimate(score.reward, score.low, score.high)
    tasks = list(score.by_task.get(agent, {}).values())
    return estimate_mean(tasks, reward_bounds(tasks, score.declared)) if tasks else Estimate(score.by_agent.get(agent))


def _sentence(validations: Sequence[Line], lines: Sequence[Line], steps: Sequence[StepRow], declared: Declared) -> str:
    if len(validations) > 1:
        first, last = (Score.from_metrics(validations[place], declared) for place in (0, -1))
        return held_out_sentence(first, last, *difference(last, first))
    losses = [line["loss"] for line in lines if line["kind"] == "val" and "loss" in line]
    if losses:
        return f"The held-out loss went from {decimal(losses[0])} to {decimal(losses[-1])}."
    rewards = [line["reward"] for line in lines if line["kind"] == "train" and line.get("reward") is not None]
    if rewards:
        ends = f"from {decimal(rewards[0])} to {decimal(rewards[-1])} in {len(rewards)} steps"
        return (
            f"The training reward went {ends}. Each step has different tasks, so this does not measure improvement:"
            " give held-out tasks with --val."
        )
    rollouts = sum(row.rollouts for row in steps)
    return f"No training step has ended. The store holds {rollouts} rollouts."


def _cost(lines: Sequence[Line]) -> RunCost:
    def total(name: str) -> float:
        return sum(float(line.get(name) or 0.0) for line in lines if line["kind"] != "alarm")

    return RunCost(
        seconds=total("seconds"),
        rollouts=round(total("rollouts")),
        tokens_prompt=round(total("tokens_prompt")),
        tokens_generated=round(total("tokens_generated")),
    )
