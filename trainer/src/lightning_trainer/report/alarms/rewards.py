"""Alarms for rewards: one source pays more and more, and one that policies cannot learn to please does not follow.

What a policy learns to please is compared with what it is not trained on: an automatic rule with the held-out reward,
which includes no rules, and a judge with a second judge, whose scores are not learned.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Final

from lightning_trainer.report.alarms import WINDOW, Found, ends
from lightning_trainer.report.history import History, Points

SOURCE: Final = "reward_source/"
OF_OUTCOME: Final = frozenset({"run", "score", "emit_reward", "judge", "failed"})  # sources other than automatic rules
AGREEMENT: Final = "judge_agreement"
LESS: Final = 0.2  # fall of the agreement of two judges, where 0.5 is chance
CHANCE: Final = 0.65  # agreement below this says little


def rule_departs(history: History) -> Found:
    """Yield an alarm if a rule gives more than at first, and the outcome is significantly worse than it was."""
    for name in history.names(SOURCE):
        points, rule = history.series("train", name), name.removeprefix(SOURCE)
        if rule.partition(":")[0] in OF_OUTCOME | {"evaluator"} or len(points) < 2 * WINDOW or not rises(points):
            continue
        first, now = ends(points)
        fall = _fall_of_outcome(history)
        if fall is not None:
            text = (
                f"The rule {rule} gives {now:+.3f} a rollout, {first:+.3f} at first, and {fall}: it pays for something"
                " else than the outcome. Look at rollouts with lightning-rl traces, lower its weight in [rewards], or"
                " try lightning-rl rewards attack."
            )
            yield f"/{rule}", text


def judges_part(history: History) -> Found:
    """Yield an alarm if a judge and a second judge agree less often on the better rollout of a group than at first."""
    points = history.series("train", AGREEMENT)
    if len(points) < 2 * WINDOW:
        return
    first, now = ends(points)
    if now <= first - LESS and now < CHANCE and rises([(step, -value) for step, value in points]):
        text = (
            f"The second judge agrees with the judge on {now:.0%} of the pairs of rollouts, {first:.0%} at first (50 %"
            " is chance): the policy may have learned what this judge likes, not what is good. Read both judges'"
            " explanations with lightning-rl traces, and improve the rubric or change the judge."
        )
        yield "", text


def rises(points: Points) -> bool:
    """Whether a number has risen by more than three times its usual change from step to step.

    The usual change is the median of the absolute differences of neighbours. With normal noise that is 0.95 standard
    deviations, so the means of three steps that nothing has changed differ by that much once in 4,000 times.
    """
    first, now = ends(points)
    return now - first > 3 * statistics.median(abs(b - a) for (_, a), (_, b) in pairwise(points))


def _fall_of_outcome(history: History) -> str | None:
    """Return how far the outcome has fallen: held out, or in training without held-out tasks; None if it has not."""
    highs = history.series("val", "from_best_high")
    rewards = history.series("val", "reward")
    if rewards:
        changes = history.series("val", "from_best")
        if history.has_tasks and history.fall() is None:
            return None
        if not highs or highs[-1][1] >= 0 or highs[-1][0] != rewards[-1][0]:
            return None
        return f"the held-out reward is {-changes[-1][1]:.2f} below its best (95 % interval below 0)"
    for name in (f"{SOURCE}{source}" for source in sorted(OF_OUTCOME - {"failed"})):
        points = history.series("train", name)
        if len(points) >= 2 * WINDOW and rises([(step, -value) for step, value in points]):
            first, now = ends(points)
            return f"the reward from {name.removeprefix(SOURCE)} has fallen from {first:.3f} to {now:.3f}"
    return None


CHECKS: Final = (rule_departs, judges_part)
