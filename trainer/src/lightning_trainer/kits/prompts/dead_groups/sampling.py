"""Rollouts of dead tasks under instructions, which replace the agents' own prompts on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_spans.errors import AgentFailedError, LightningError
from lightning_spans.schema.agents import selects
from lightning_spans.store.traces import traces_of
from lightning_trainer.kits.prompts.dead_groups.distil import InstructedRollout
from lightning_trainer.kits.prompts.dead_groups.own_prompts import has_text
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.failures import advice, most_frequent_error
from lightning_trainer.rl.rewards.callers import request_of
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.rl.scores import rollout_rewards
from lightning_trainer.rl.usage import tokens_of

if TYPE_CHECKING:
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.callbacks import CallbackContext, StepRollouts
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.kits.prompts.dead_groups.options import DeadGroupRules
    from lightning_trainer.kits.prompts.dead_groups.tasks import DeadTasks, Instruction


@dataclass(frozen=True, slots=True)
class InstructedTask:
    """A dead task, with the instruction under which it is sampled.

    Attributes:
        digest: its key in `DeadTasks`.
        task: as the program gets it.
        instruction: that replaces the prompt of its agent.
        own: the agent's own prompt.
    """

    digest: str
    task: Mapping[str, Any]
    instruction: Instruction
    own: str

    @property
    def prompts(self) -> dict[str, dict[str, str]]:
        """The prompts that its rollouts carry: `record.prompts.Prompts`."""
        return {self.instruction.agent: {"before": self.own, "after": self.instruction.text}}


def counted_rewards(outcomes: Sequence[Outcome], config: TrainConfig) -> dict[str, float]:
    """Return the reward of each rollout that counts, by its id: -inf for a failure, because it solves nothing."""
    counted = {o.rollout.rollout_id: o.counts(config.failed) is o.crash for o in outcomes if o.crash is not None}
    found = rollout_rewards(outcomes, config.failed, config.agents)
    return {name: -math.inf if counted.get(name) else reward for name, reward in found.items()}


class InstructedSampler:
    """Samples tasks under instructions.

    Args:
        context: of the run.
        options: number of rollouts, and the condition for a solved task.
    """

    def __init__(self, context: CallbackContext, options: DeadGroupRules) -> None:
        self._run, self._session, self._options = context.run, context.session, options

    def sample(
        self, tasks: Sequence[InstructedTask], known: DeadTasks, rollouts: StepRollouts
    ) -> list[InstructedRollout]:
        """Sample tasks, and record in `known` which of them were solved, and the cost.

        Raises:
            LightningError: all rollouts failed, or no instruction reached its agent.
        """
        config, store = self._run.config, self._session.store
        planned = plan(
            [task.task for task in tasks],
            name=f"{rollouts.name}:i{rollouts.step}",
            size=self._options.rollouts or config.group_size,
            mode="prompts",
            max_attempts=config.max_attempts,
            timeout_s=config.timeout_s,
        )
        for group in {rollout.group_id for rollout in planned}:
            store.consume_group(group, f"{rollouts.name}/{rollouts.step}")
        size = len(planned) // len(tasks)
        task_of = {rollout.rollout_id: tasks[number // size] for number, rollout in enumerate(planned)}
        outcomes = self._run_under(planned, {name: task.prompts for name, task in task_of.items()})
        counted = {a.attempt_id: o for o in outcomes if (a := o.counts(config.failed)) is not None}
        if not counted:
            errors = [outcome.error or "" for outcome in outcomes]
            raise AgentFailedError(
                f"all {amount(len(outcomes), 'rollout')} under an instruction failed. {most_frequent_error(errors)}\n"
                f"{advice(errors)}"
            )
        rewards, sampled = counted_rewards(outcomes, config), list[InstructedRollout]()
        for trace in traces_of(store, attempt_ids=list(counted)):
            outcome = counted[str(trace.attempt_id)]
            task = task_of[outcome.rollout.rollout_id]
            solved = self._solves(rewards.get(outcome.rollout.rollout_id, -math.inf), known)
            task.instruction.tried[task.digest] = task.instruction.tried.get(task.digest, False) or solved
            sampled.append(InstructedRollout(outcome, trace, task.instruction, task.own, solved))
        known.rollouts += len(outcomes)
        known.tokens += sum(sum(tokens_of(node)) for one in sampled for node in one.trace.chats)
        _refuse_unreached(sampled)
        return sampled

    def _run_under(self, planned: Sequence[Rollout], prompts: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
        """Run rollouts that carry their instructions."""
        state = self._session.app.state
        before = state.routing.prompts
        state.routing = replace(state.routing, prompts={**before, **prompts})
        try:
            what = "rollouts under an instruction"
            return self._session.run(planned, self._run.progress, what, check=self._run.check)
        finally:
            state.routing = replace(state.routing, prompts=before)

    def _solves(self, reward: float, known: DeadTasks) -> bool:
        least = self._options.solved
        return reward > known.lowest if least is None else reward >= least


def _refuse_unreached(sampled: Sequence[InstructedRollout]) -> None:
    """Reject a program whose agent never gets its instruction.

    Raises:
        LightningError: with the name of the agent.
    """
    reached: dict[str, bool] = {}
    for one in sampled:
        agent, text = one.instruction.agent, one.instruction.text
        for node in (node for node in one.trace.chats if selects((agent,), node.path)):
            reached[agent] = reached.get(agent, False) or has_text(request_of(node), text)
    for agent in (agent for agent, found in reached.items() if not found):
        raise LightningError(
            f"no instruction reached agent {agent!r}: its calls still contain its own prompt. Prompts are replaced in"
            " calls of the openai client, in a program that calls attach(). Train this program without with_prompts."
        )
