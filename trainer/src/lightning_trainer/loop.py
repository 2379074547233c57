"""The training loop: validate, roll out, learn, save; each step a function of the seed and what came before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lightning_spans.agents import check_known, selects
from lightning_spans.errors import LightningError
from lightning_spans.store import Rollout
from lightning_spans.trace import Trace, traces_of
from lightning_spans.watch import waiting
from lightning_trainer import watch
from lightning_trainer.account import Account
from lightning_trainer.algorithms.rl import Algorithm, Batch, Penalty, Traces
from lightning_trainer.backends import Backend
from lightning_trainer.capture import FirstTask
from lightning_trainer.checkpoints import State, save
from lightning_trainer.config import TrainConfig
from lightning_trainer.data import Task, batch_at
from lightning_trainer.engine import Engine
from lightning_trainer.interrupts import Interrupted
from lightning_trainer.local import Local
from lightning_trainer.metrics import Kind, MetricLog
from lightning_trainer.overview import not_heard, nothing_captured
from lightning_trainer.policies import BASE
from lightning_trainer.progress import Progress
from lightning_trainer.resampling import other_tasks, with_contrast
from lightning_trainer.rollouts import Outcome, plan
from lightning_trainer.scores import Score, by_source, score

PATIENCE: Final = 3  # first steps that may all teach nothing before the run is given up


class NothingLearnedError(LightningError):
    """The run can't teach anything as it is; the message says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with; opened and closed by `train`."""

    config: TrainConfig
    tasks: Sequence[Task]
    val: Sequence[Task]
    local: Local
    backend: Backend
    algorithm: Algorithm
    log: MetricLog
    progress: Progress
    check: Callable[[], None]
    folder: Path
    name: str  # of the run, unique in the store


class Loop:
    """Takes steps from a state on."""

    def __init__(self, parts: Parts, state: State) -> None:
        self._parts = parts
        self.state = state
        self._saved = state.step if state.step else None
        self._told: set[str] = set()  # reasons for which calls were left out
        self._fresh: set[str] = set()  # groups of this step that are ours
        self._whole = True  # whether weights and state belong together
        self._began = time.monotonic()
        self._seconds_before = state.seconds

    def run(self) -> None:
        """Take all steps, with validation and checkpoints; steps taken are saved when it is stopped or fails, too."""
        try:
            self._run_all()
        except (LightningError, Interrupted):
            self._save()
            raise

    def _run_all(self) -> None:
        steps = self._parts.config.step_count(len(self._parts.tasks))
        self._parts.progress.begin(self.state.step, steps)
        while self.state.step < steps and not self._goal_reached():
            self._validate_if_due()
            if self.state.step % self._parts.config.save_every == 0:
                self._save()
            self._step()
        self._refuse_flat(final=True)
        self._save()
        self._tell_unheard()
        self._validate()

    def _save(self) -> None:
        """Write a checkpoint, unless this state is saved already, nothing was learned yet, or an update was cut."""
        if self._saved == self.state.step or self.state.flat_steps is not None or not self._whole:
            return
        self._parts.progress.phase("saving")
        seconds = self._seconds_before + time.monotonic() - self._began
        state = replace(self.state, seconds=seconds)
        with waiting("checkpoint write", f"the checkpoint of step {state.step} in {self._parts.folder}"):
            save(self._parts.folder, state, self._parts.backend.save, keep=self._parts.config.keep)
        self._saved = self.state.step
        self._parts.log.draw()

    def _validate_if_due(self) -> None:
        every = self._parts.config.val_every
        if self.state.step == 0 or (every is not None and self.state.step % every == 0):
            self._validate()

    def _validate(self) -> None:
        """Run the held-out tasks, sampled as in training, unless it was done with these weights."""
        step, config, began = self.state.step, self._parts.config, time.monotonic()
        if not self._parts.val or any(at == step for at, _ in self._parts.log.series("val", "rollouts")):
            return
        rollouts = plan(
            self._parts.val,
            name=f"{self._parts.name}.{step}:v",  # the same seeds in each validation: fewer differences by chance
            size=config.val_samples,
            mode="val",
            max_attempts=config.max_attempts,
            timeout_s=config.timeout_s,
        )
        outcomes = self._run(rollouts, "validation")
        result = score(outcomes, config.failed)
        self._log("val", step, {**result.metrics(), "seconds": time.monotonic() - began})
        self._parts.progress.note(f"held out after {step} steps: {describe(result)}")

    def _step(self) -> None:
        config, step, began = self._parts.config, self.state.step, time.monotonic()
        self._fresh = set()
        places = batch_at(step, len(self._parts.tasks), config.batch_size, config.seed)
        outcomes = self._run(self._plan(places, f"t{step}"), "rollouts")
        rolled_s = time.monotonic() - began
        traces = watch.Kept(self._traces)
        ages = {engine.model: engine.version for engine in self._parts.backend.engines}

        def roll(count: int, number: int) -> list[Outcome]:
            nonlocal rolled_s
            again = time.monotonic()
            more = other_tasks(count, places, len(self._parts.tasks), f"{config.seed}/{step}/{number}")
            places.extend(more)
            found = self._run(self._plan(more, f"t{step}r{number}"), f"rollouts for {count} groups without contrast")
            rolled_s += time.monotonic() - again
            return found

        batch, outcomes = with_contrast(outcomes, config.resample, lambda some: self._judge(some, traces), roll)
        self._refuse_barren(batch, outcomes)
        adapted_s = time.monotonic() - began - rolled_s
        self._parts.check()
        self._parts.progress.phase(f"learning from {len(batch.rows)} rows")
        self._whole = False
        learned = self._learn(batch)
        result = score(outcomes, config.failed)
        given = [reward for outcome in outcomes for reward in outcome.rewards]
        metrics = {
            **result.metrics(),
            **batch.account.metrics(),
            **by_source([*given, *batch.automatic], result.rollouts - result.failed),
            **watch.of_groups(*watch.compared(batch)),
            **watch.of_traces(traces.found),
            **watch.of_rows(batch.rows, ages),
            **learned,
            **versions(self._parts.backend.engines),
            "rollout_seconds": rolled_s,
            "adapt_seconds": adapted_s,
            "seconds": time.monotonic() - began,
        }
        self._log("train", step, metrics)
        self._parts.progress.step(step, metrics)
        self._tell(batch.account, outcomes)
        self._advance(batch, result)
        if step == 0:
            self._tell_unheard()

    def _log(self, kind: Kind, step: int, metrics: dict[str, float]) -> None:
        """Keep numbers, and show the alarms that stand after them."""
        self._parts.log.add(kind, step, metrics)
        self._parts.progress.alarms([alarm.text for alarm in self._parts.log.alarms])

    def _nothing_captured(self, rollouts: int) -> NothingLearnedError:
        return NothingLearnedError(nothing_captured(rollouts, self._parts.local.runner.attached))

    def _run(self, rollouts: Sequence[Rollout], what: str) -> list[Outcome]:
        first = FirstTask(self._parts.local.store, rollouts, self._nothing_captured)

        def check() -> None:
            self._parts.check()
            if not self.state.step:
                first()

        outcomes = self._parts.local.run(rollouts, self._parts.progress, what, check=check)
        if not self.state.step:
            self._refuse_unknown(outcomes)
        if all(outcome.attempt is None for outcome in outcomes):
            raise LightningError(
                f"all {len(outcomes)} rollouts failed ({what} after {self.state.step} steps). The last error:\n"
                f"{_end(outcomes[-1].error or '')}\n"
                "Run the agent by itself on one task, and see the workers' logs in the run's folder."
            )
        return outcomes

    def _refuse_unknown(self, outcomes: Sequence[Outcome]) -> None:
        """Refuse at once a selection that matches nothing: such agents' calls go to the user's own endpoint.

        Failed attempts count too: without an endpoint of their own they all fail, and this is why.
        """
        attempts = [attempt.attempt_id for outcome in outcomes for attempt in outcome.attempts]
        seen = {name for trace in self._traces(attempts) for name in trace.agents}
        self.state = replace(self.state, agents=tuple(sorted({*self.state.agents, *seen})))
        chosen = self._parts.config.agents
        if chosen is not None and seen and not any(selects(chosen, name) for name in seen):
            check_known(chosen, seen)

    def _tell(self, account: Account, outcomes: Sequence[Outcome]) -> None:
        """Say what became of the batch's calls, the first time and whenever calls are left out for a new reason."""
        if not account.dropped.keys() <= self._told or not self._told:
            self._parts.progress.note("; ".join(account.lines()))
            self._told |= {"", *account.dropped}
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            self._parts.progress.note(f"{len(errors)} of {len(outcomes)} rollouts failed: {_end(errors[-1], 1)}")

    def _tell_unheard(self) -> None:
        """Warn of agents that are to be trained and made no call so far: they may speak later, or be misspelt."""
        text = not_heard(self._parts.config.agents or (), self.state.agents, self.state.step)
        if text is not None:
            self._parts.progress.note(text)

    def _plan(self, places: Sequence[int], name: str) -> list[Rollout]:
        config = self._parts.config
        return plan(
            [self._parts.tasks[place] for place in places],
            name=f"{self._parts.name}:{name}",
            size=config.group_size,
            mode="train",
            max_attempts=config.max_attempts,
            timeout_s=config.timeout_s,
        )

    def _judge(self, outcomes: Sequence[Outcome], traces: Traces) -> Batch:
        """Make rows of groups that no other consumer has."""
        groups = {outcome.rollout.group_id for outcome in outcomes}
        consumer = f"{self._parts.name}/{self.state.step}"
        self._fresh |= {
            group for group in groups - self._fresh if self._parts.local.store.consume_group(group, consumer)
        }
        whole = [outcome for outcome in outcomes if outcome.rollout.group_id in self._fresh]
        with waiting("rows", f"the rows of {len(whole)} rollouts"):
            batch = self._parts.algorithm(whole, traces, self.state.agents, **self._penalty())
        self._parts.local.store.add_rewards(batch.automatic)  # to be seen beside the others; their source says whose
        return batch

    def _refuse_barren(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """Refuse what can't teach anything and never will."""
        if batch.account.seen == 0:
            raise self._nothing_captured(len(outcomes))
        if batch.account.trained == 0:
            raise NothingLearnedError(_no_rows(batch))

    def _penalty(self) -> dict[str, Penalty]:
        config = self._parts.config
        return {"penalty": self._parts.backend.penalties} if config.kl_in == "reward" and config.kl_coef > 0 else {}

    def _learn(self, batch: Batch) -> dict[str, float]:
        """Update the weights. Where no row has a gradient the optimiser is left alone: it would move by momentum."""
        if not any(row.has_gradient for row in batch.rows) and not self._parts.config.learns_from_flat_groups:
            return {"update_seconds": 0.0}
        began = time.monotonic()
        with waiting("update", f"the backend to learn from {len(batch.rows)} rows"):
            learned = self._parts.backend.update(batch.rows)
        return {**learned, "update_seconds": time.monotonic() - began}

    def _advance(self, batch: Batch, result: Score) -> None:
        flat = not any(row.has_gradient for row in batch.rows)
        count = None if not flat or self.state.flat_steps is None else self.state.flat_steps + 1
        names = {name for name in batch.agents if name is not None}
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            agents=tuple(sorted({*self.state.agents, *names})),
            flat_steps=count,
            rewards=(*self.state.rewards, result.reward),
        )
        self._whole = True
        if flat:
            self._parts.progress.note(f"step {self.state.step} teaches nothing: in each group all rewards are equal")
        self._refuse_flat(final=False)

    def _refuse_flat(self, *, final: bool) -> None:
        flat = self.state.flat_steps
        if flat and (final or flat >= PATIENCE):
            seen = sorted({reward for reward in self.state.rewards if reward is not None})
            raise NothingLearnedError(
                f"in the first {flat} steps the rewards of each group were all equal (mean reward "
                f"{', '.join(f'{reward:g}' for reward in seen[:5])}), so there is nothing to learn from.\n"
                "Give tasks that the agent solves sometimes, a reward with more steps between bad and good, a larger "
                "--group-size, or a higher temperature."
            )

    def _goal_reached(self) -> bool:
        goal = self._parts.config.until
        newest = self.state.rewards[-2:]
        return goal is not None and len(newest) == 2 and all(r is not None and r >= goal for r in newest)

    def _traces(self, attempt_ids: Sequence[str]) -> list[Trace]:
        return traces_of(self._parts.local.store, attempt_ids=attempt_ids)


def versions(engines: Sequence[Engine]) -> dict[str, float]:
    """Number the weights, for logs; of several policies the newest, and each under its name."""
    each = {f"policy_version/{engine.model}": float(engine.version) for engine in engines if engine.model != BASE}
    newest = {"policy_version": float(max(engine.version for engine in engines))}
    return newest if len(engines) == 1 else {**newest, **each}


def describe(result: Score) -> str:
    """Say a score in a line."""
    reward = "no rollout succeeded" if result.reward is None else f"reward {result.reward:.3f}"
    agents = "".join(f", {name} {value:.3f}" for name, value in result.by_agent.items())
    failed = f", {result.failed} of {result.rollouts} failed" if result.failed else f" ({result.rollouts} rollouts)"
    return f"{reward}{agents}{failed}"


def _end(text: str, lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _no_rows(batch: Batch) -> str:
    agents = ", ".join(f"{name or 'without a name'}: {count} calls" for name, count in batch.agents.items())
    facts = "\n".join(f"  {line}" for line in batch.account.lines())
    return (
        f"not one of the model calls can be trained on. Agents seen: {agents}.\n{facts}\n"
        "Calls without a name need `with lightning_spans.agent(...)`; calls without tokens did not reach the gateway."
    )
