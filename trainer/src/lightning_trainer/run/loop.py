"""The training loop: validate, run rollouts, learn, save; each step a function of the seed and what came before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import LightningError, NothingToLearnError
from lightning_spans.record.stalls import waiting
from lightning_spans.schema.attempts import Rollout
from lightning_trainer.backend_protocol import Learner, OpenRun, UpdateRefusedError
from lightning_trainer.callbacks import Callback, Extra, StepRollouts
from lightning_trainer.engines.contract import samples_apart
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report import learned_tokens, step_metrics
from lightning_trainer.report.agents import unheard_warning
from lightning_trainer.report.answers import of_answers
from lightning_trainer.report.failures import where_calls_go
from lightning_trainer.report.log.lines import MOST_FREQUENT, PROMPTS, WAITED_FOR
from lightning_trainer.report.metrics import Kind, best_step
from lightning_trainer.report.speed.waits import (
    divide_step,
    longest_wait,
    name_bottleneck,
    time_rollouts,
)
from lightning_trainer.report.step_notes import (
    all_flat,
    how_they_count,
    infrastructure_sentence,
    no_signal,
    score_line,
    unrewarded_agents,
    unrewarded_note,
)
from lightning_trainer.report.teams import cliffs
from lightning_trainer.report.teams.shares import agent_entropies, policies_of, token_shares
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.attempts import Traces
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.comparison import Penalty
from lightning_trainer.rl.resampling import with_contrast
from lightning_trainer.rl.rewards.judge import take_failures
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import BY_TASK, Score, by_source, reward_of_failures, score
from lightning_trainer.run.cliffs import CliffGuard
from lightning_trainer.run.collecting.batches import Collection
from lightning_trainer.run.collecting.step import StepSampler, StepWork
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.run.state import LONGEST_UNSAVED_S, State, mark_best, save, unmark_best
from lightning_trainer.session.session import Session

PATIENCE: Final = 3  # first steps that may all teach nothing before the run is ended


class Loop:
    """Takes steps from a state on.

    Args:
        run: what was opened for it.
        local: runs rollouts.
        learner: answers the agents' calls, and learns.
        state: where the run stands.
        callbacks: take part in each step.
    """

    def __init__(
        self, run: OpenRun, local: Session, learner: Learner, state: State, callbacks: Sequence[Callback] = ()
    ) -> None:
        self._run = run
        self._local = local
        self._learner = learner
        self._callbacks = callbacks
        self._patience = max([PATIENCE, *(callback.patience for callback in callbacks)])
        self._algorithm = algorithm_by_name(run.config.algorithm)
        self._collection = Collection(run, local, state.successes, self._before_rollouts)
        self._guard = CliffGuard(run, learner, state)
        self.state = state
        self._saved = state.step if state.step else None
        self._saved_at = time.monotonic()
        self._told: set[str] = set()  # reasons for which calls were left out
        self._unrewarded: set[str] = set()  # agents that a warning named
        self._fresh: set[str] = set()  # our groups of this step
        self._whole = True  # whether weights and state match
        self._began = time.monotonic()
        self._seconds_before = state.seconds
        self._first = state.step

    def run(self) -> None:
        """Take all steps, with validation and checkpoints. Steps taken are also saved if it is stopped or fails."""
        try:
            self._run_all()
        except (LightningError, SavedInterrupt):
            self._collection.cancel()
            self._save()
            raise

    def _run_all(self) -> None:
        steps = self._run.steps
        best = best_step(self._run.log.validations())
        unmark_best(self._run.folder, best)
        if best is not None:
            mark_best(self._run.folder, best)  # again, if the run went back from a later one
        self._guard.resume(self.state.step)
        self._run.progress.begin(self.state.step, steps)
        if self.state.step >= steps:
            self._run.progress.note(f"this run has completed its {amount(steps, 'step')}: continue with --steps N")
        elif self._goal_reached():
            self._run.progress.note(f"this run has reached its goal of {self._run.config.until}: see --until")
        while self.state.step < steps and not self._goal_reached():
            if not self._run.config.rollback_on_cliff:  # otherwise the validation may change the weights
                self._save_if_due()
            self._validate_if_due()
            self._save_if_due()
            self._step()
        self._collection.cancel()
        self._refuse_flat(final=True)
        self._save()
        self._tell_unheard()
        self._validate()

    def _save_if_due(self) -> None:
        unsaved_s = time.monotonic() - self._saved_at
        if self.state.step % self._run.config.save_every == 0 or unsaved_s >= LONGEST_UNSAVED_S:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint, unless this state is saved already, nothing was learned yet, or an update was cut."""
        if self._saved == self.state.step or self.state.flat_steps is not None or not self._whole:
            return
        self._run.progress.phase("saving")
        seconds = self._seconds_before + time.monotonic() - self._began
        state = replace(self.state, seconds=seconds)
        holds, learner = self._run.config.checkpoint, self._learner
        with waiting("checkpoint write", f"the checkpoint of step {state.step} in {self._run.folder}"):
            save(
                self._run.folder,
                replace(state, resumable=holds != "weights"),
                partial(self._write, resumable=holds != "weights"),
                keep=self._run.config.keep,
                strip=learner.strip if holds == "newest" else None,
            )
        self._saved, self._saved_at = self.state.step, time.monotonic()
        self._run.log.draw()

    def _write(self, checkpoint: Path, *, resumable: bool) -> None:
        self._learner.save(checkpoint, resumable=resumable)
        for callback in self._callbacks:
            callback.after_save(checkpoint, self.state.step)

    def _validate_if_due(self) -> None:
        every = self._run.config.val_every
        if self.state.step == 0 or (every is not None and self.state.step % every == 0):
            self._validate()

    def _validate(self) -> None:
        """Run the held-out tasks, sampled as in training, unless it was done with these weights and tasks."""
        step, config, began = self.state.step, self._run.config, time.monotonic()
        if not self._run.val or any(line["step"] == step for line in self._run.log.validations()):
            return
        outcomes = self._collection.held_out(step)
        self._hear()
        result = score(outcomes, config.failed, config.agents, config.declared)
        traces = self._collection.traces([a.attempt_id for o in outcomes for a in o.attempts])
        alike, frequent = of_answers(traces, config.agents)
        # a judge compares the rollouts of one task at one time: two validations by it cannot be compared
        by_task = {} if self._run.judge is not None else result.by_task
        earlier, prompts = self._run.log.validations(), cliffs.digest_prompts(traces, config.agents)
        change = cliffs.from_best([*earlier, {"step": step, BY_TASK: by_task}])
        numbers = {**result.metrics(), **alike, **cliffs.new_prompts(prompts, earlier), **change}
        numbers["seconds"] = time.monotonic() - began
        self._log("val", step, numbers, {BY_TASK: by_task, MOST_FREQUENT: frequent, PROMPTS: prompts})
        self._run.progress.note(f"held out after {amount(step, 'step')}: {score_line(result)}")
        if self._saved == step:  # then the curve lacks this validation
            self._run.log.draw()
        if step and best_step(self._run.log.validations()) == step:
            self._save()
            mark_best(self._run.folder, step)
        self._return_fallen()

    def _return_fallen(self) -> None:
        """Keep the best weights of each policy; if one fell, save the run after its return."""
        before, self.state = self.state, self._guard.watch(self.state)
        if before.slowed != self.state.slowed:
            self._saved = None
            self._save()

    def _step(self) -> None:
        config, step, began = self._run.config, self.state.step, time.monotonic()
        self._fresh = set()
        for callback in self._callbacks:
            callback.before_step(step)
        work = self._prepare(step)
        self._run.progress.phase(f"learning from {len(work.batch.rows)} rows")
        self._whole = False
        learned = self._learn(work.batch)
        result = score(work.outcomes, config.failed, config.agents, config.declared)
        self._report(step, work, result, {**learned, "seconds": time.monotonic() - began})
        self._advance(work.batch, result)
        if step == 0:
            self._tell_unheard()

    def _prepare(self, step: int) -> StepWork:
        """Run the rollouts of a step and create the batch that it learns from."""
        began, config, collection = time.monotonic(), self._run.config, self._collection
        sampler = StepSampler(collection, step, config.seed)
        outcomes = sampler.run_batch()
        self._hear()
        traces = step_metrics.TraceCache(collection.traces)
        rollouts = StepRollouts(name=collection.name, step=step, outcomes=outcomes, traces=traces, kept=self.state.kept)
        extra_began = time.monotonic()
        extra = self._before_batch(rollouts)
        extra_s = time.monotonic() - extra_began
        versions = {engine.model: engine.version for engine in self._learner.engines}
        batch, outcomes = with_contrast(
            outcomes, config.resample, lambda some: self._judge([*some, *extra.outcomes], traces), sampler.run_others
        )
        collection.refuse_barren(batch, outcomes, self.state)
        adapted_s = time.monotonic() - began - sampler.seconds - extra_s
        self._run.check()
        batch, changed = self._after_batch(batch, replace(rollouts, outcomes=outcomes, seen=traces.found))
        return StepWork(
            batch=batch,
            outcomes=outcomes,
            traces=_without(traces.found, extra.outcomes),
            versions=versions,
            windows=sampler.windows,
            metrics={**extra.metrics, **changed, "rollout_seconds": sampler.seconds, "adapt_seconds": adapted_s},
        )

    def _report(self, step: int, work: StepWork, result: Score, learned: Mapping[str, float]) -> None:
        """Log the metrics of a step, and report what a user has to know of it."""
        config, batch = self._run.config, work.batch
        alike, frequent = of_answers(work.traces, config.agents)
        metrics = {
            **result.metrics(),
            **batch.account.metrics(),
            **by_source(work.outcomes, batch.automatic, config.failed),
            **take_failures(),
            **step_metrics.of_groups(*step_metrics.count_compared(batch)),
            **step_metrics.of_traces(work.traces),
            **step_metrics.of_endings(work.outcomes),
            **alike,
            **step_metrics.of_rows(batch.rows, work.versions),
            **token_shares(batch.rows),
            **work.metrics,
            **learned,
            **step_metrics.of_versions(self._learner.engines),
        }
        metrics |= divide_step(time_rollouts(work.outcomes, work.traces, work.windows), metrics)
        longest, _ = longest_wait(metrics) or ("", 0.0)
        self._log("train", step, metrics, {MOST_FREQUENT: frequent, WAITED_FOR: longest, **policies_of(batch.rows)})
        self._run.progress.step(step, metrics)
        self._name_bottleneck()
        self._tell(batch.account, work.outcomes)
        self._tell_unrewarded(batch)
        if (text := infrastructure_sentence(metrics)) is not None:
            self._run.progress.note(text)

    def _before_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for callback in self._callbacks:
            callback.before_rollouts(rollouts)

    def _before_batch(self, rollouts: StepRollouts) -> Extra:
        """Let callbacks add their own rollouts."""
        added = [callback.before_batch(rollouts) for callback in self._callbacks]
        metrics = {name: value for extra in added for name, value in extra.metrics.items()}
        return Extra([outcome for extra in added for outcome in extra.outcomes], metrics)

    def _after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, dict[str, float]]:
        """Let callbacks change what is learned."""
        metrics: dict[str, float] = {}
        for callback in self._callbacks:
            batch, own = callback.after_batch(batch, rollouts)
            metrics |= own
        return batch, metrics

    def _log(
        self,
        kind: Kind,
        step: int,
        metrics: dict[str, float],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write metrics to the log, and show the resulting alarms."""
        self._run.log.add(kind, step, metrics, facts)
        self._run.progress.alarms([alarm.text for alarm in self._run.log.alarms])

    def _name_bottleneck(self) -> None:
        steps = [line for line in self._run.log.lines("train") if line["step"] >= self._first]
        apart = samples_apart(self._learner.engine)
        text = name_bottleneck(steps, self._run.config, samples_apart=apart)
        if text is not None:
            self._run.progress.note(text)

    def _hear(self) -> None:
        """Add the agents that were seen."""
        self.state = replace(self.state, agents=tuple(sorted({*self.state.agents, *self._collection.agents})))

    def _tell(self, account: Account, outcomes: Sequence[Outcome]) -> None:
        """Report the outcomes of the batch's calls, the first time and whenever calls are left out for a new reason."""
        if not account.dropped.keys() <= self._told or not self._told:
            self._run.progress.note("; ".join(account.lines()))
            self._told |= {"", *account.dropped}
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            crashed = sum(outcome.crash is not None for outcome in outcomes)
            how = how_they_count(crashed, reward_of_failures(outcomes, self._run.config.failed), self._run.config)
            text = f"{len(errors)} of {amount(len(outcomes), 'rollout')} failed{how}: {_end(errors[-1], 1)}"
            self._run.progress.note(f"{text}\n{where_calls_go(errors[-1])}".rstrip())

    def _tell_unrewarded(self, batch: Batch) -> None:
        """Warn once of each selected agent whose calls get no reward."""
        new = [name for name in unrewarded_agents(batch.calls) if name not in self._unrewarded]
        if new:
            named = sorted({reward.agent for reward in batch.given if reward.agent is not None})
            self._run.progress.note(unrewarded_note(new, named))
            self._unrewarded |= set(new)

    def _tell_unheard(self) -> None:
        """Warn of selected agents without a call so far: they may call later, or be misspelt."""
        text = unheard_warning(self._run.config.agents or (), self.state.agents, self.state.step)
        if text is not None:
            self._run.progress.note(text)

    def _judge(self, outcomes: Sequence[Outcome], traces: Traces) -> Batch:
        """Create rows of groups that no other consumer has."""
        groups = {outcome.rollout.group_id for outcome in outcomes}
        consumer = f"{self._collection.name}/{self.state.step}"
        self._fresh |= {group for group in groups - self._fresh if self._local.store.consume_group(group, consumer)}
        whole = [outcome for outcome in outcomes if outcome.rollout.group_id in self._fresh]
        with waiting("rows", f"the rows of {len(whole)} rollouts"):
            batch = self._algorithm.batch(self._run.config, whole, traces, self.state.agents, penalty=self._penalty())
        self._local.store.add_rewards(batch.automatic)  # to be shown next to the others; their source names the owner
        return batch

    def _penalty(self) -> Penalty | None:
        config = self._run.config
        return self._learner.penalties if config.kl_in == "reward" and config.kl_coef > 0 else None

    def _learn(self, batch: Batch) -> dict[str, float]:
        """Update the weights. Without a row with a gradient the optimiser is not used: it would move by momentum."""
        if not any(row.has_gradient or self._run.config.learns_from_flat_groups for row in batch.rows):
            return {"update_seconds": 0.0}
        began = time.monotonic()
        try:
            with waiting("update", f"the backend to learn from {len(batch.rows)} rows"):
                learned = self._learner.update(batch.rows)
        except UpdateRefusedError:
            self._whole = True
            raise
        seen = {learned_tokens.row_name(row): tokens for row, tokens in self._learner.seen.items()}
        learned_tokens.write(self._run.folder, self.state.step, seen)
        return {**agent_entropies(self._learner.seen), **learned, "update_seconds": time.monotonic() - began}

    def _advance(self, batch: Batch, result: Score) -> None:
        flat = not any(row.has_gradient for row in batch.rows)
        count = None if not flat or self.state.flat_steps is None else self.state.flat_steps + bool(batch.rows)
        names = {name for name in batch.agents if name is not None}
        kept = {name: value for callback in self._callbacks for name, value in callback.kept.items()}
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            agents=tuple(sorted({*self.state.agents, *names})),
            flat_steps=count,
            rewards=(*self.state.rewards, result.reward),
            successes=self._collection.order.learn(result, batch.rows),
            kept={**self.state.kept, **kept},
        )
        self._whole = True
        if flat:
            why = no_signal(batch.rows, self._run.config)
            self._run.progress.note(f"step {self.state.step} has no signal: {why}")
        self._refuse_flat(final=False)

    def _refuse_flat(self, *, final: bool) -> None:
        flat = self.state.flat_steps
        if flat and (final or flat >= self._patience):
            raise NothingToLearnError(all_flat(flat, self.state.rewards, self._run.config))

    def _goal_reached(self) -> bool:
        goal = self._run.config.until
        newest = self.state.rewards[-2:]
        return goal is not None and len(newest) == 2 and all(r is not None and r >= goal for r in newest)


def _without(traces: Sequence[Trace], forks: Sequence[Outcome]) -> list[Trace]:
    """Leave out the traces of forks: most of their content is their records'."""
    forked = {attempt.attempt_id for outcome in forks for attempt in outcome.attempts}
    return [trace for trace in traces if trace.attempt_id not in forked]


def _end(text: str, lines: int = 15) -> str:
    return "\n".join(text.splitlines()[-lines:])
