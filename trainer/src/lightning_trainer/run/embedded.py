"""A backend whose policy learns in this process: our own loop takes the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backend_protocol import Learner, OpenRun, RunDescription, Start
from lightning_trainer.callbacks import CallbackContext, open_callbacks, wanted_callbacks
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.engines.contract import check_engines
from lightning_trainer.engines.devices import are_planned
from lightning_trainer.gateway.engine import Engine, tool_format
from lightning_trainer.gateway.prompt.template import check_calls
from lightning_trainer.report.forecast import Plan, Probe, disk_lines, forecast, lines
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.rewards import installed
from lightning_trainer.run.collecting.batches import check_staleness
from lightning_trainer.run.data import Task, batch_at, load_tasks
from lightning_trainer.run.loop import Loop
from lightning_trainer.run.probe import probe
from lightning_trainer.run.state import State, check_identity, check_resumable, find, identity_of, read_state
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import serve

TRIED: Final = 8  # most tasks that a dry run tries
TRIAL_S: Final = 10.0  # seconds for a dry run's rollouts; on two cores the update then takes about three times as long


class EmbeddedBackend:
    """`Backend` with a learner of its own.

    Args:
        opened: makes the learner that a configuration asks for. It is closed when the run ends.
        check: refuses what the learner can't do, before anything is opened.
        sized: counts the bytes of a checkpoint, and of all that a run of so many steps keeps at once; None where they
            are not known.
        loaded: makes a learner of a model and options, without a run; None: it learns in runs alone.
        plan: says in lines what samples and how memory is divided, and whether it suffices. Nothing is loaded.
        priced: forecasts a bill from the other facts of a dry run, as facts and as lines; None: nothing is billed.
    """

    def __init__(
        self,
        opened: Callable[[TrainConfig], Learner],
        check: Callable[[TrainConfig], None],
        sized: Callable[[TrainConfig, int], tuple[int, int] | None] = lambda _config, _steps: None,
        loaded: Callable[[str, Mapping[str, Any]], Learner] | None = None,
        *,
        plan: Callable[[TrainConfig], tuple[Sequence[str], bool]] = lambda _config: ((), True),
        priced: Callable[[TrainConfig, Mapping[str, Any]], tuple[Mapping[str, Any], Sequence[str]]] | None = None,
    ) -> None:
        self._opened = opened
        self._check = check
        self._sized = sized
        self._loaded = loaded
        self._plan = plan
        self._priced = priced

    def learner(self, model: str, options: Mapping[str, Any]) -> Learner:
        """Load a model to learn from data; see `Backend.learner`."""
        if self._loaded is None:
            raise ConfigError("this backend learns from rollouts alone, not from data. Use --backend torch.")
        return self._loaded(model, options)

    def start(self, config: TrainConfig, identity: Mapping[str, Any]) -> Start:
        """Reject what cannot work, and find the state to continue from; see `Backend.start`."""
        # The learner's options come from these kinds: their own errors name the option that the user wrote.
        for kind in wanted_callbacks(config):
            kind.check(config)
        self._check(config)
        check_staleness(config)
        if config.resume is None:
            return Start()
        folder, checkpoint = find(config.resume)
        state = read_state(checkpoint)
        check_resumable(state, checkpoint)
        check_identity(state, identity, checkpoint)
        return Start(step=state.step, folder=folder, checkpoint=checkpoint, seconds=state.seconds)

    def train(self, run: OpenRun) -> int:
        """Take the steps; see `Backend.train`."""
        state = State(step=0, identity=dict(run.identity))
        with ExitStack() as stack:
            stack.enter_context(installed(run.rules))
            run.progress.phase(f"loading {run.config.model}")
            learner = stack.enter_context(closing(self._opened(run.config)))
            check_calls(learner.engine.tokenizer, tool_format(learner.engine))
            if run.start.checkpoint is not None:
                learner.load(run.start.checkpoint)
                state = read_state(run.start.checkpoint)
            run = replace(run, check=partial(_check_all, run.check, learner.engines))
            run.check()
            session = stack.enter_context(
                serve(
                    run.store,
                    run.runner,
                    AnswerSource.of(learner.engines, run.config.policies),
                    sampling_of(run.config),
                    port=run.config.port,
                    timeouts=run.config.timeouts,
                    failed=run.config.failed,
                )
            )
            context = CallbackContext(run=run, session=session, learner=learner, load=self.learner, kept=state.kept)
            callbacks = stack.enter_context(open_callbacks(context))
            run.begin()
            loop = Loop(run, session, learner, state, callbacks)
            loop.run()
            return loop.state.step

    def describe(self, config: TrainConfig, progress: Progress) -> RunDescription:
        """Run one step's rollouts and one update that is not kept, and forecast the run, or its rest."""
        tasks = load_tasks(config.data, config.columns)
        val = load_tasks(config.val, config.columns) if config.val else []
        start = self.start(config, identity_of(config, tasks))
        planned, fits = self._plan(config)
        whole = config.step_count(len(tasks))
        steps, sizes = max(0, whole - start.step), self._sized(config, whole)
        if not fits or are_planned():
            disk = disk_lines(*sizes) if sizes and fits else []
            return RunDescription("\n".join([*planned, *disk]), {"engine": list(planned), "fits": fits})
        for line in planned:  # first, because what follows may end for lack of memory
            progress.note(line)
        count = min(TRIED, config.batch_size, len(tasks))
        places = batch_at(start.step, len(tasks), config.batch_size, config.seed)[:count]
        between = max(0, steps - 1) // config.val_every if config.val_every else 0
        asked = Plan(
            step_rollouts=config.batch_size * config.group_size + config.fork_count,
            steps=steps,
            forks=config.fork_count,
            resample=config.resample,
            at_once=config.concurrency * max(1, config.worker_count()),
            val_rollouts=len(val) * config.val_samples,
            validations=2 + between if val else 0,
            checkpoint=sizes[0] if sizes else None,
            disk=sizes[1] if sizes else None,
        )
        load, name = partial(self._load_start, start), f"t{start.step}"  # samples what the run's first step will sample
        found = probe(config, tasks, places, load, progress, update=True, limit_s=TRIAL_S, name=name)
        facts = {**forecast(found, asked), "engine": list(planned), "fits": True}
        billed, told = self._priced(config, facts) if self._priced is not None else ({}, ())
        return RunDescription("\n".join([*lines(facts), *facts["engine"], *told]), {**facts, **billed})

    def _load_start(self, start: Start, config: TrainConfig) -> Learner:
        """Load the policy in its state at the beginning of the run."""
        learner = self._opened(config)
        if start.checkpoint is not None:
            learner.load(start.checkpoint)
        return learner

    def probe(
        self,
        config: TrainConfig,
        tasks: Sequence[Task],
        places: Sequence[int],
        progress: Progress,
        *,
        update: bool,
        limit_s: float = math.inf,
    ) -> Probe:
        """Try some tasks with the policy that a run would start from; see `probe.probe`.

        Raises:
            LightningError: an option or a file is wrong, or the agent failed.
        """
        self._check(config)
        return probe(config, tasks, places, self._opened, progress, update=update, limit_s=limit_s)


def _check_all(check: Callable[[], None], engines: Sequence[Engine]) -> None:
    """Raise if somebody asked the program to stop, or if the engine has ended."""
    check()
    check_engines(engines)
