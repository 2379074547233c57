"""Texts about a step: its score, how its failures count, and why nothing can be learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lightning_trainer.choices import SELF
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.intervals import Estimate
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import nearest
from lightning_trainer.report.step_metrics import INFRASTRUCTURE
from lightning_trainer.report.terminal import decimal, some
from lightning_trainer.rl.account import WHOLE, UntrainedReason
from lightning_trainer.rl.algorithms.distil import DISTIL
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.endings import Ending
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.scores import Score

UNREWARDED: Final = "unrewarded/"
"""Before the name of a selected agent without a reward, in what verl's process reports. The log does not have it."""


def score_line(result: Score) -> str:
    """Return a score as one line."""
    reward = "no rollout succeeded" if result.reward is None else f"reward {decimal(result.reward)}"
    if result.low is not None and result.high is not None:
        reward += f" ({decimal(result.low)} to {decimal(result.high)}, 95 %, {amount(result.tasks, 'task')})"
    agents = "".join(f", {name} {decimal(value)}" for name, value in result.by_agent.items())
    failed = (
        f", {result.failed} of {result.rollouts} failed"
        if result.failed
        else f" ({amount(result.rollouts, 'rollout')})"
    )
    return f"{reward}{agents}{failed}"


def held_out_sentence(before: Score, after: Score, rise: Estimate, tasks: int) -> str:
    """Return a sentence on how the held-out reward changed.

    Args:
        before: the score before training.
        after: the score after training.
        rise: of the reward, paired by task; without numbers if the two cannot be compared.
        tasks: how many it covers.
    """
    if before.reward is None or after.reward is None:
        return "The held-out reward is missing before or after training: no rollout counted."
    ends = f"from {decimal(before.reward)} to {decimal(after.reward)}"
    if rise.mean is None or rise.low is None or rise.high is None:
        return f"The held-out reward went {ends}; the two can't be compared."
    how = "rose" if rise.mean > 0 else "fell" if rise.mean < 0 else "stayed"
    sure = "" if rise.low > 0 or rise.high < 0 else "; that may be chance, because the interval contains 0"
    difference = (
        f"{rise.mean:+.3f} ({decimal(rise.low)} to {decimal(rise.high)}, 95 %), paired over {amount(tasks, 'task')}"
    )
    return f"The held-out reward {how} {ends}: difference {difference}{sure}."


def infrastructure_sentence(metrics: Mapping[str, float]) -> str | None:
    """Return how many attempts of a step ended by a fault of the infrastructure; None if none did."""
    ended = [name for name in metrics if name.startswith(INFRASTRUCTURE)]
    counts = {name.removeprefix(INFRASTRUCTURE): int(metrics[name]) for name in ended}
    if not counts:
        return None
    kinds = "; ".join(f"{count} {slug}: {Ending.from_slug(slug).text}" for slug, count in counts.items())
    return (
        f"{amount(sum(counts.values()), 'attempt')} ended by a fault of the infrastructure and do not count as the"
        f" policy's; they are tried again up to max_attempts ({kinds})"
    )


def how_they_count(crashed: int, reward: float, config: TrainConfig) -> str:
    """Return how failures of the policy count, and which option changes it."""
    if not crashed:
        return " and are left out, because no answer of a model led to it"
    if config.failed == "exclude":
        return f", {crashed} of them after a model's answer: left out, which teaches it to crash. Use --failed lowest"
    return f", {crashed} of them after a model's answer, which count as reward {reward:g} (--failed)"


def all_flat(steps: int, rewards: Sequence[float | None], config: TrainConfig) -> str:
    """Return a message that the first steps taught nothing, and what to do."""
    seen = sorted({reward for reward in rewards if reward is not None})
    mean = ", ".join(f"{reward:g}" for reward in seen[:5])
    untold = "no call had a result for its teacher to read"
    equal = f"the rewards of each group were all equal (mean reward {mean})"
    tell = "Use tasks in which tools fail sometimes, or let the teacher read more (--teacher-options told=...)."
    vary = (
        "Give tasks that the agent solves sometimes, a reward with more steps between bad and good, a larger "
        "--group-size, or a higher temperature."
    )
    taught = config.teacher == SELF
    alone = taught and config.algorithm == DISTIL
    what = untold if alone else f"{equal}, and {untold}" if taught else equal
    first = "step" if steps == 1 else f"{steps} steps"
    return f"in the first {first} {what}, so there is nothing to learn from.\n{tell if taught else vary}"


def no_signal(rows: Sequence[Row], config: TrainConfig) -> str:
    """Return why a step without a gradient taught nothing."""
    if not rows:
        return "none of its calls can be used for training"
    told = config.teacher == SELF
    return "no call has a result for the teacher to read" if told else "in each group all rewards are equal"


def unrewarded_agents(calls: Iterable[CountedCall]) -> list[str]:
    """Return the names of selected agents that got no reward for any of these calls."""
    by_reward: dict[bool, set[str]] = {True: set(), False: set()}
    for call in calls:
        name = call.transition.agent
        if name is not None and call.left_out in {None, UntrainedReason.NO_REWARD}:
            by_reward[call.left_out is None].add(name)
    return sorted(by_reward[False] - by_reward[True])


def unrewarded_note(agents: Sequence[str], named: Sequence[str]) -> str:
    """Return a warning about selected agents that learn nothing.

    Args:
        agents: these.
        named: the agents that rewards name; empty if there is no reward at all.
    """
    why = f"the rewards name only {some(named)}" if named else "no rollout got a reward"
    them = ", ".join(agents)
    return f"WARNING: no reward for {them}, so nothing is learned there: {why}. Reward {them} too."


def no_rows(batch: Batch) -> str:
    """Return a message that nothing in a batch can be trained on, and why."""
    agents = ", ".join(f"{name or 'without a name'}: {amount(count, 'call')}" for name, count in batch.agents.items())
    facts = "\n".join(f"  {line}" for line in batch.account.lines())
    lost = sorted(set(batch.account.unclaimed) - {WHOLE})
    advice = (
        "Calls without a name need `with lightning_spans.agent(...)`; calls without tokens did not reach the gateway."
    )
    if lost:
        advice = f"Rewards name {nearest(lost, sorted(filter(None, batch.agents)))}. Use the agents' names as listed."
    return f"none of the model calls can be used for training. Agents seen: {agents}.\n{facts}\n{advice}"
