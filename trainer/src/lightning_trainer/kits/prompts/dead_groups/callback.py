"""Dead groups as a callback of a run: try instructions before a batch is made, and distil their successes with it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import label, selects
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, Extra, StepRollouts
from lightning_trainer.gateway.auth.keys import RUN_S
from lightning_trainer.kits.prompts.adapter import agent_records
from lightning_trainer.kits.prompts.dead_groups.distil import InstructedRollout, distilled_rows
from lightning_trainer.kits.prompts.dead_groups.options import DeadGroupRules, read_options
from lightning_trainer.kits.prompts.dead_groups.proposals import EXAMPLES, FILE, PaidProposals, propose
from lightning_trainer.kits.prompts.dead_groups.sampling import InstructedSampler, InstructedTask, counted_rewards
from lightning_trainer.kits.prompts.dead_groups.tasks import PROVE, DeadTasks, Instruction
from lightning_trainer.kits.prompts.reading import read_prompts
from lightning_trainer.kits.prompts.reflection import Reflection, read_reflection
from lightning_trainer.kits.prompts.session import CandidateRun
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.rl.scores import task_digest
from lightning_trainer.session.answers import Endpoint

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.batch import Batch

KEPT: Final = "with_prompts"  # key in the state of a run and in its log
PROPOSED: Final = "instruction"  # kind of a log line


class DeadGroupsKind(CallbackKind):
    """Takes part in runs that set the option `with_prompts`."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether dead groups are used."""
        return config.with_prompts

    def check(self, config: TrainConfig) -> None:
        """Reject wrong options, and a proposing model that cannot be reached."""
        read_options(config)
        if config.reflector is not None:
            read_reflection(config.reflector, None)

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Open the callback."""
        return _open(context)


@contextmanager
def _open(context: CallbackContext) -> Iterator[DeadGroupsCallback]:
    run = context.run
    reflect = run.config.reflector
    at = _policy(context) if reflect is None else read_reflection(reflect, None)
    seed = {"seed": run.config.seed} if reflect is None else {}
    paid = PaidProposals(run.folder / FILE)
    reflection = Reflection(at, paid, run.check, seed)
    callback = DeadGroupsCallback(context, read_options(run.config), reflection, paid)
    try:
        yield callback
    finally:
        run.progress.note(callback.summary)


def _policy(context: CallbackContext) -> Endpoint:
    """Return the endpoint of the trained model; with several adapters, of the model without them."""
    key = context.session.app.state.keys.issue("admin", expires_s=RUN_S)
    return Endpoint(f"{context.session.url}/v1", context.learner.engine.model, key)


class DeadGroupsCallback(Callback):
    """Samples dead tasks under instructions, and trains the policy on the rollouts that solve them.

    Args:
        context: of the run.
        options: when to use instructions, at what cost, and how.
        reflection: proposes instructions.
        paid: its proposals.
    """

    def __init__(
        self, context: CallbackContext, options: DeadGroupRules, reflection: Reflection, paid: PaidProposals
    ) -> None:
        self._run, self._session, self._learner = context.run, context.session, context.learner
        self._options, self._reflection, self._paid = options, reflection, paid
        self._sampler = InstructedSampler(context, options)
        self._known = DeadTasks()
        self._sampled: list[InstructedRollout] = []  # of this step
        self._logged: set[str] = set()  # agents whose missing instruction was logged

    @property
    def patience(self) -> int:
        """Steps until each task was visited often enough, and every proposal was tried as often as it may be."""
        size = self._run.config.batch_size
        passes = math.ceil(len(self._run.tasks) / size)
        steps = math.ceil(PROVE / min(self._options.tasks, size))  # that one proposal takes
        return self._options.visits * passes + self._options.proposals * steps

    @property
    def kept(self) -> Mapping[str, Any]:
        """Which tasks are dead, and which instructions were tried."""
        return {KEPT: self._known.to_json()}

    @property
    def summary(self) -> str:
        """Number of dead groups, number of solved tasks, and the cost."""
        known = self._known
        return (
            f"dead groups: {known.groups}; {amount(len(known.tried), 'task')} sampled under an instruction,"
            f" {len(known.solved)} of them solved; {amount(self._paid.count, 'proposal')},"
            f" {amount(known.rollouts, 'rollout')} and {self._tokens} tokens"
        )

    @property
    def _tokens(self) -> int:
        return self._paid.tokens + self._known.tokens

    @property
    def _is_spent(self) -> bool:
        return self._options.tokens is not None and self._tokens >= self._options.tokens

    def before_batch(self, rollouts: StepRollouts) -> Extra:
        """Sample the dead tasks of a step under instructions, and return the metrics."""
        config, began, paid = self._run.config, time.monotonic(), self._paid.count
        self._known = known = DeadTasks.from_json(rollouts.kept.get(KEPT, {}))
        tokens = self._tokens
        rewards, declared = counted_rewards(rollouts.outcomes, config), config.declared
        by_task: dict[str, list[float]] = defaultdict(list)
        for outcome in rollouts.outcomes:
            own = rewards.get(outcome.rollout.rollout_id)
            by_task[task_digest(outcome.rollout.task)] += [] if own is None else [own]
        dead = known.visit(by_task, None if declared is None else declared[0])
        due = [task for task in dead if known.visits[task] >= self._options.visits]
        self._read_own(rollouts)
        tasks = [] if self._is_spent else self._plan(due, rollouts)
        self._sampled = [] if self._is_spent or not tasks else self._sampler.sample(tasks, known, rollouts)
        tried = {rollout.outcome.rollout.group_id: False for rollout in self._sampled}
        tried |= {rollout.outcome.rollout.group_id: True for rollout in self._sampled if rollout.solved}
        metrics = {
            "dead_groups": len(dead),
            "dead_groups_due": len(due),
            "instructed_groups": len(tried),
            "instructed_groups_solved": sum(tried.values()),
            "instruction_proposals": self._paid.count - paid,
            "instruction_tokens": self._tokens - tokens,
            "instruction_seconds": time.monotonic() - began,
        }
        return Extra(metrics={name: float(value) for name, value in metrics.items()})

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:  # noqa: ARG002
        """Add the answers that solved a task, as answers to the agents' own prompts."""
        if not self._sampled:
            return batch, {}
        rows, account = distilled_rows(self._sampled, self._learner, self._run.config.agents, self._options.weight)
        metrics = {"distilled_calls": float(account.trained), "distilled_tokens": float(account.tokens)}
        return replace(batch, rows=[*batch.rows, *rows], account=batch.account + account), metrics

    def _read_own(self, rollouts: StepRollouts) -> None:
        """Read the prompts of trained agents that were not seen before.

        Raises:
            ConfigError: none of them has a prompt that can be replaced.
        """
        chosen, own, problem = self._run.config.agents, self._known.own, None
        traces = rollouts.traces([attempt.attempt_id for o in rollouts.outcomes for attempt in o.attempts])
        paths = {path for trace in traces for path in trace.agent_paths if selects(chosen or ("*",), path)}
        for agent in sorted({label(path, chosen) for path in paths} - own.keys()):
            try:
                own[agent] = read_prompts(traces, [agent])[agent].text
            except ConfigError as error:
                problem = error
                if agent not in self._logged:
                    self._run.progress.note(f"with_prompts instructs no agent {agent!r}: {error}")
                    self._logged.add(agent)
        if problem is not None and not own:
            raise ConfigError(f"with_prompts has no agent to instruct. {problem}")

    def _plan(self, due: Sequence[str], rollouts: StepRollouts) -> list[InstructedTask]:
        """Choose the instruction under which each task is sampled; if none is left, propose one."""
        outcomes = {task_digest(outcome.rollout.task): outcome for outcome in rollouts.outcomes}
        left = self._paid.count < self._options.proposals
        chosen = {task: self._known.choose(task) for task in due}
        taken = [task for task in due if left or chosen[task] is not None][: self._options.tasks]
        new = [task for task in taken if chosen[task] is None]
        proposed = self._propose(new, rollouts) if new else None
        return [
            InstructedTask(task, outcomes[task].rollout.task, instruction, self._known.own[instruction.agent])
            for task in taken
            if (instruction := chosen[task] or proposed) is not None
        ]

    def _propose(self, tasks: Sequence[str], rollouts: StepRollouts) -> Instruction | None:
        """Propose an instruction from the failed rollouts of some tasks, alternating between the agents."""
        known, examples, agent = self._known, [], ""
        ran = self._failed_rollouts(tasks[:EXAMPLES], rollouts)
        agents = sorted(known.own)
        for number in range(len(agents)):
            agent = agents[(self._paid.count + number) % len(agents)]
            if examples := [record for one in ran for record in agent_records(one, agent)]:
                break
        if not examples:
            return None
        failed = [each.text for each in known.instructions if each.agent == agent and not each.solved]
        self._run.progress.phase("a proposal for tasks that no rollout solves")
        text = propose(self._reflection, known.own[agent], examples, failed[-EXAMPLES:])
        before = {each.text for each in known.instructions if each.agent == agent} | {known.own[agent], ""}
        facts = {"agent": agent, "text": text, "tasks": len(tasks), "new": text not in before}
        self._run.log.add_event(PROPOSED, rollouts.step, facts)
        if text in before:
            self._run.progress.note(f"the instruction that was proposed for {agent} is not new, and is not tried")
            return None
        known.instructions.append(Instruction(agent, text))
        self._run.progress.note(f"{agent}: an instruction for {amount(len(tasks), 'task')} that no rollout solves")
        return known.instructions[-1]

    def _failed_rollouts(self, tasks: Sequence[str], rollouts: StepRollouts) -> list[CandidateRun]:
        """Return one rollout of each task."""
        counted = {task_digest(o.rollout.task): o for o in rollouts.outcomes if o.counts(self._run.config.failed)}
        attempts = {task: counted[task].counts(self._run.config.failed) for task in tasks}
        ids = {task: attempt.attempt_id for task, attempt in attempts.items() if attempt is not None}
        traces = {trace.attempt_id: trace for trace in rollouts.traces(list(ids.values()))}
        return [CandidateRun(counted[task], traces.get(ids[task])) for task in ids]
