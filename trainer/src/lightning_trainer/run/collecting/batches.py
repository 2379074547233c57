"""Rollouts for the loop: planned from the order of tasks, queued ahead of the step that learns from them, awaited.

With ``staleness = S`` the batches of a step and of the S steps after it are queued when the step begins, so that agents
work while the step learns. Each step learns from the complete batch with its own number: nothing is dropped, however
slow its task is, and no rollout is learned from more than S updates after it was queued. Because a batch follows from
its number alone, a resumed run queues the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning_spans.errors import AgentFailedError, NothingToLearnError, UnknownAgentError
from lightning_spans.schema.agents import check_known, label, selects
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import explain_no_calls
from lightning_trainer.report.failures import advice, last_error, most_frequent_error, where_calls_go
from lightning_trainer.report.step_notes import no_rows
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.run.collecting.capture import FirstTask
from lightning_trainer.run.collecting.order import TaskOrder
from lightning_trainer.run.group_ids import name_start

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.backend_protocol import OpenRun
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.run.collecting.curriculum import Estimates
    from lightning_trainer.run.state import State
    from lightning_trainer.session.session import Session


def check_staleness(config: TrainConfig) -> None:
    """Reject options that need the weights that sampled a step's rollouts, or more rollouts within the step.

    Raises:
        ConfigError: names the option, and says what to do.
    """
    if not config.staleness:
        return
    first = f"staleness = {config.staleness} samples with older weights than those that learn"
    refuse(
        {
            f"{first}, and credit = {config.credit} samples alternatives with the newest. Set staleness = 0.": (
                config.uses_forks
            ),
            f"{first}, and orders = {config.orders} compares with runs of the newest. Set staleness = 0.": (
                config.by_coalitions
            ),
            f"{first}, and teacher = {config.teacher} corrects what the newest sampled. Set staleness = 0.": (
                config.teacher is not None
            ),
            f"resample = {config.resample} waits for more rollouts within a step, and staleness ="
            f" {config.staleness} lets no step wait for the newest ones. Set one of them to 0.": config.resample > 0,
        }
    )


class Collection:
    """Runs the rollouts of a run.

    Args:
        run: provides the tasks.
        local: runs them.
        successes: estimates of the continued run.
        before: called with training rollouts before they are queued.

    Attributes:
        order: chooses the tasks of a step.
        name: prefix of the ids of this start's rollouts.
        agents: names of the agents seen in the first rollouts.
    """

    def __init__(
        self, run: OpenRun, local: Session, successes: Estimates, before: Callable[[Sequence[Rollout]], None]
    ) -> None:
        self._run = run
        self._local = local
        self._before = before
        self._ahead: dict[int, list[Rollout]] = {}  # by step: queued, and not awaited yet
        self.name = name_start(run.folder)
        self.agents: set[str] = set()
        self.order = TaskOrder(run.config, run.tasks, successes)

    def of_step(self, step: int) -> list[Outcome]:
        """Queue the batches of a step and of those after it, as far as `staleness` says, and wait for the step's.

        Raises:
            LightningError: see `roll_out`.
        """
        for number in range(step, min(step + 1 + self._run.config.staleness, self._run.steps)):
            if number not in self._ahead:
                self._ahead[number] = self.plan(self.order.places(number), f"t{number}")
                self._local.queue(self._ahead[number])
        return self._wait(self._ahead.pop(step), "rollouts", step)

    def plan(self, places: Sequence[int], name: str) -> list[Rollout]:
        """Plan a group of rollouts for each of these tasks."""
        config = self._run.config
        rollouts = plan(
            [self._run.tasks[place] for place in places],
            name=f"{self.name}:{name}",
            size=config.group_size,
            mode="train",
            max_attempts=config.max_attempts,
            timeout_s=config.timeout_s,
        )
        self._before(rollouts)
        return rollouts

    def held_out(self, step: int) -> list[Outcome]:
        """Run the held-out tasks with the weights after so many steps.

        Raises:
            LightningError: see `roll_out`.
        """
        config = self._run.config
        rollouts = plan(
            self._run.val,
            name=f"{self.name}.{step}:v",  # the same seeds in each validation, for smaller random differences
            size=config.val_samples,
            mode="val",
            max_attempts=config.max_attempts,
            timeout_s=config.timeout_s,
        )
        return self.roll_out(rollouts, "validation", step)

    def roll_out(self, rollouts: Sequence[Rollout], what: str, step: int) -> list[Outcome]:
        """Queue rollouts, wait until they have ended, and have them judged.

        Args:
            rollouts: to run.
            what: their name in progress messages.
            step: steps taken before. Before the first, what cannot work is rejected at once.

        Raises:
            AgentFailedError: all failed, or no call of an agent was seen.
            UnknownAgentError: the agents to be trained are none of those seen.
            LightningError: see `Session.wait`.
        """
        self._local.queue(rollouts)
        return self._wait(rollouts, what, step)

    def traces(self, attempt_ids: Sequence[str]) -> list[Trace]:
        """Read the traces of attempts."""
        return traces_of(self._local.store, attempt_ids=attempt_ids)

    def cancel(self) -> None:
        """Cancel what was queued ahead: no step will learn from it."""
        left = [rollout.rollout_id for rollouts in self._ahead.values() for rollout in rollouts]
        self._ahead.clear()
        if left:
            self._local.store.cancel(left)

    def nothing_captured(self, rollouts: int) -> AgentFailedError:
        """Return the error for rollouts without a call."""
        return AgentFailedError(explain_no_calls(rollouts, self._local.runner.attached, self._run.config.command))

    def refuse_barren(self, batch: Batch, outcomes: Sequence[Outcome], state: State) -> None:
        """Reject what can never teach anything. An agent that was seen before may make no usable call in a step.

        Raises:
            AgentFailedError: no call was seen.
            NothingToLearnError: no call can be used for training.
        """
        chosen = self._run.config.agents
        known = chosen is None or any(selects(chosen, name) for name in {*state.agents, *filter(None, batch.agents)})
        if batch.account.trained or (state.step and known):
            return
        if batch.account.seen == 0:
            raise self.nothing_captured(len(outcomes))
        raise NothingToLearnError(no_rows(batch))

    def _wait(self, rollouts: Sequence[Rollout], what: str, step: int) -> list[Outcome]:
        first = FirstTask(self._local.store, rollouts, self.nothing_captured)

        def check() -> None:
            self._run.check()
            if not step:
                first()

        outcomes = self._local.wait(rollouts, self._run.progress, what, check=check)
        if self._run.judge is not None:
            self._run.progress.phase(f"judging {what}")
            outcomes = self._run.judge.judge(outcomes)
        if not step:
            self._refuse_unknown(outcomes)
        if all(o.attempt is None and (o.crash is None or not step) for o in outcomes):
            errors = [outcome.error or "" for outcome in outcomes]
            error = most_frequent_error(errors)
            raise AgentFailedError(
                f"all {amount(len(outcomes), 'rollout')} failed ({what} after {step} steps). {error}\n"
                f"{where_calls_go(error, agents=self._untrained())}{advice(errors)}"
                " The workers' logs are in the run's folder."
            )
        return outcomes

    def _untrained(self) -> set[str]:
        chosen = self._run.config.agents
        return set() if chosen is None else {name for name in self.agents if not selects(chosen, name)}

    def _refuse_unknown(self, outcomes: Sequence[Outcome]) -> None:
        """Reject at once a selection that matches nothing: such agents' calls go to the user's own endpoint.

        Failed attempts count too: without an endpoint of their own they all fail, and this is why.
        """
        seen = {
            path
            for trace in self.traces([attempt.attempt_id for outcome in outcomes for attempt in outcome.attempts])
            for path in trace.agent_paths
        }
        chosen = self._run.config.agents
        self.agents |= {label(path, chosen) for path in seen}
        if chosen is not None and seen and not any(selects(chosen, path) for path in seen):
            try:
                check_known(chosen, seen)
            except UnknownAgentError as error:
                if any(outcome.attempt is not None for outcome in outcomes):
                    raise
                text = outcomes[-1].error or ""  # this may be why they never called
                raise UnknownAgentError(
                    f"{error}\nAll {len(outcomes)} rollouts failed, too. The last error:\n{last_error(text)}\n"
                    f"{where_calls_go(text)}"
                ) from None
