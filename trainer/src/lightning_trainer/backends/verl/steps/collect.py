"""Conversion of verl's prompts to our rollouts, and back: the `agent_loop_manager_class`.

verl supplies prompts and reads rows from TransferQueue. Between the two, the user's agents run wherever the runners
are; each group of rollouts becomes rows as on the torch backend, by the run's algorithm.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_spans import hooks
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import LightningError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store, open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer.backends.verl.control import RunServerClient
from lightning_trainer.backends.verl.options.algorithms import on_verl
from lightning_trainer.backends.verl.steps.empty import EmptyGroups
from lightning_trainer.backends.verl.steps.gathered import GroupCollector
from lightning_trainer.backends.verl.steps.groups import Groups
from lightning_trainer.backends.verl.steps.trajectories import Trajectory, VerlPrompt, read_sources, trajectories
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.judges import read_judge
from lightning_trainer.lineage.manifest import Manifest
from lightning_trainer.report import step_metrics
from lightning_trainer.report.speed.waits import RolloutTime, Window
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.attempts import Traces
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.rewards.judge import PLUGIN, Judge, read_rules
from lightning_trainer.rl.rollouts import Outcome, outcomes, plan
from lightning_trainer.rl.rows import Row
from lightning_trainer.rl.scores import Score, reward_of_failures, score, total
from lightning_trainer.run.group_ids import name_start
from lightning_trainer.run.learned_from import run_facts, sources_of

PARTITION: Final = "train"


class RolloutCollector:
    """Runs verl's prompts as rollouts of the user's agents. Created by verl's task runner, in the trainer's process."""

    def __init__(self, config: Any) -> None:
        lightning = config.lightning
        self._run = TrainConfig(**json.loads(Path(lightning.config).read_text(encoding="utf-8")))
        control = RunServerClient.of(lightning)
        rules = read_rules(self._run.rewards, credit=self._run.credit, gamma=self._run.gamma)
        if rules:
            hooks.register(Judge(rules), PLUGIN)  # this is the trainer's process, and ends with it
        self._store = open_store(control.url, key=control.key)
        self._control = control
        # The rubric may be a file. The run's own process has read it and calls the judge.
        table = {name: value for name, value in self._run.judge.items() if name != "rubric"}
        self._options = read_judge(self._run.reward, table)
        self._groups = Groups(
            self._store,
            judging=self._judge if self._options else None,
            at_once=self._options.concurrency if self._options else 1,
            timeouts=self._run.timeouts,
        )
        # Of this start: rollouts of a killed run are not used again.
        self._name = name_start(Path(lightning.config).parent)
        self._gathered = GroupCollector(self._run.failed, self._run.agents, self._run.declared)
        self._agents: set[str] = set()
        self._times: Counter[int] = Counter()
        self._empty = EmptyGroups(self._run.batch_size)
        self._manifest = Manifest(Path(lightning.config).parent)
        self._first_step: int | None = None  # that this start requested, from 0

    @classmethod
    def create(cls, *, config: Any, **_: Any) -> RolloutCollector:
        """Create it. verl's clients and reward workers are not used, because the run's own server replaces them."""
        return cls(config)

    def check(self) -> None:
        """Check that rollouts are still collected.

        Raises:
            LightningError: why they are not.
        """
        self._groups.check()

    def generate_sequences(self, prompts: Any) -> None:
        """Queue the rollouts of these prompts and return at once."""
        for row in as_dicts(prompts):
            prompt = VerlPrompt(
                uid=str(row["uid"]),
                step=int(row["global_steps"]),
                values_as_rewards=on_verl(self._run).critic,
            )
            if self._first_step is None:
                self._first_step = prompt.step - 1  # verl counts from 1
                self._manifest.begin(run_facts(self._run), self._first_step)
            name, place = self._place_of(int(row["index"]))
            rollouts = self._plan(row["task"], name, place, self._run.group_size, "train")
            tq.kv_put(key=prompt.uid, partition_id=PARTITION, tag={"status": "running"})
            self._groups.add(rollouts, functools.partial(self._write_group, prompt))

    def note_step(self, step: int, keys: Sequence[str]) -> None:
        """Record in the run's manifest what a step learns from.

        Args:
            step: its number, from 0.
            keys: of its rows.
        """
        rows = tq.kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=["extra_fields"])
        self._manifest.add_step(step, read_sources(as_dicts(rows)))

    def validate(self, tasks: Sequence[Mapping[str, Any]], step: int) -> Score:
        """Run held-out tasks, sampled as in training, and wait for all of them.

        Raises:
            LightningError: rollouts are no longer collected, or the judge gave no verdict on any.
        """
        ended: list[Outcome] = []
        done = threading.Semaphore(0)

        def keep(outcomes: list[Outcome]) -> None:
            ended.extend(outcomes)
            done.release()

        for place, task in enumerate(tasks):
            name = f"{self._name}.{step}:v"  # the same seeds in each validation: fewer differences by chance
            self._groups.add(self._plan(task, name, place, self._run.val_samples, "val"), keep)
        for _ in tasks:
            while not done.acquire(timeout=1.0):
                self.check()
        if ended and all(outcome.unjudged is not None for outcome in ended):
            raise LightningError(f"held out after {step} steps: {ended[-1].unjudged}")
        return score(ended, self._run.failed, self._run.agents, self._run.declared)

    def take_ended(self, windows: Sequence[Window]) -> tuple[dict[str, float], RolloutTime]:
        """Return the metrics of the training rollouts that ended since the last call, and how they were waited for."""
        return self._gathered.take(windows)

    def _judge(self, ended: list[Outcome]) -> list[Outcome]:
        """Have a group judged by the judge in the run's own process, and read the results."""
        limit_s = self._options.longest_s if self._options else 0.0
        unjudged = self._control.judge([outcome.rollout.rollout_id for outcome in ended], limit_s)
        again = outcomes(self._store, [outcome.rollout for outcome in ended], self._run.timeouts)
        return [replace(outcome, unjudged=unjudged.get(outcome.rollout.rollout_id)) for outcome in again]

    def _place_of(self, index: int) -> tuple[str, int]:
        """Return the batch and the position in it. verl may return to a position if groups were dropped."""
        step, place = divmod(index, self._run.batch_size)
        self._times[index] += 1
        again = f".{self._times[index]}" if self._times[index] > 1 else ""
        return f"{self._name}{again}:t{step}", place

    def _plan(self, task: Mapping[str, Any], name: str, place: int, size: int, mode: str) -> list[Rollout]:
        limits: dict[str, Any] = {"max_attempts": self._run.max_attempts, "timeout_s": self._run.timeout_s}
        return plan([task], name=name, size=size, mode=mode, first=place, **limits)

    def _write_group(self, prompt: VerlPrompt, ended: list[Outcome]) -> None:
        """Write the rows of one group, once."""
        group_id = ended[0].rollout.group_id
        if not self._store.consume_group(group_id, f"{self._name}/{prompt.step}"):
            raise LightningError(f"group {group_id} was trained on before. Is another run using this store?")
        traces = step_metrics.TraceCache(functools.partial(_traces, self._store))
        batch = make_batch(self._run, ended, traces, self._agents)
        self._store.add_rewards(batch.automatic)
        self._agents |= {name for name in batch.agents if name is not None}
        self._empty.add(batch, ended, begun=bool(self._first_step))
        sources = sources_of(batch, traces.found, {one.rollout.rollout_id: one.rollout.task for one in ended})
        rows: dict[str, list[Row]] = defaultdict(list)
        for row in batch.rows:
            rows[row.rollout_id].append(row)
        crashed = reward_of_failures(ended, self._run.failed)
        rewards = [total(o.rewards) if o.counts(self._run.failed) is o.attempt else crashed for o in ended]
        write(prompt, trajectories(prompt, [rows[o.rollout.rollout_id] for o in ended], rewards, sources))
        self._gathered.add(ended, batch, traces.found)


def make_batch(run: TrainConfig, ended: Sequence[Outcome], traces: Traces, known_agents: Iterable[str] = ()) -> Batch:
    """Make rows of one group as on the torch backend; verl's trainer makes the comparisons with the whole batch."""
    algorithm = algorithm_by_name(run.algorithm)
    return algorithm.batch(run, ended, traces, known_agents, whole=False, merge=on_verl(run).merge)


def write(prompt: VerlPrompt, laid: Sequence[Trajectory]) -> None:
    """Put rows into TransferQueue, then mark the prompt as done: a group without rows counts as failed."""
    if laid:
        tq.kv_batch_put(
            keys=[trajectory.key for trajectory in laid],
            fields=list_of_dict_to_tensordict([dict(trajectory.fields) for trajectory in laid]),
            tags=[dict(trajectory.tag) for trajectory in laid],
            partition_id=PARTITION,
        )
    tq.kv_put(key=prompt.uid, partition_id=PARTITION, tag={"status": "finished" if laid else "failure"})


def as_dicts(batch: Any) -> list[dict[str, Any]]:
    """Split verl's batch of prompts into one dictionary per prompt."""

    def value(column: Any, place: int) -> Any:
        if isinstance(column, NonTensorStack):
            return column[place].data
        if isinstance(column, NonTensorData):
            return column.data
        return column[place]

    return [{key: value(column, place) for key, column in batch.items()} for place in range(len(batch))]


def _traces(store: Store, attempt_ids: Sequence[str]) -> list[Trace]:
    return traces_of(store, attempt_ids=attempt_ids)
