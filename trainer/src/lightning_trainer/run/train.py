"""`train()`: looks up the backend, opens what a run needs, lets the backend take the steps, closes everything again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError, LightningError, NothingToLearnError
from lightning_spans.store import Store
from lightning_spans.store.urls import files_of
from lightning_trainer import registry
from lightning_trainer.backend_protocol import Backend, OpenRun, RunDescription, Start
from lightning_trainer.config.origin import with_format
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.judges import CACHE_NAME, JudgePlan, open_judge, read_judge
from lightning_trainer.models import NEWEST
from lightning_trainer.models.verl_folders import step_of, verl_checkpoint
from lightning_trainer.proxies import bypass_for_loopback
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report import trackers
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.algorithms.protocol import credit_of
from lightning_trainer.rl.endings import LATE_LEFT_OUT
from lightning_trainer.rl.rewards import read_rules
from lightning_trainer.rl.rewards.judge import JudgeRule
from lightning_trainer.run.data import Task, count_shared, digest, load_tasks
from lightning_trainer.run.folders import run_folder
from lightning_trainer.run.interrupts import SavedInterrupt, defer_interrupts
from lightning_trainer.run.result import Result, result_of
from lightning_trainer.run.state import identity_of, mark_newest, read_state
from lightning_trainer.runner.target import Job
from lightning_trainer.session.session import STORE_NAME, cancel_left_over, open_database, open_runner

_CONTINUE: Final = "lightning-rl train --resume"


def train(config: TrainConfig, progress: Progress | None = None) -> Result:
    """Train the agents that a configuration names.

    Ctrl-C or SIGTERM ends the step that is under way, saves, and raises `KeyboardInterrupt`; a second one ends the
    program at once. A backend that can't be stopped between two steps ends at once, and the run can be resumed from its
    last checkpoint.

    Args:
        config: what, on what, and how.
        progress: callback for progress events. Default: none.

    Returns:
        Rewards before and after, the curve, and where the checkpoint is.

    Raises:
        LightningError: an option, a file or the agent is wrong, or there is nothing to learn. What was learned until
            then is saved.
    """
    began, progress = time.monotonic(), progress or Silent()
    bypass_for_loopback(os.environ)
    backend: Backend = registry.by_name("backend", config.backend)
    config = with_format(config)
    _check_port(config.port)
    with _open_run(config, backend, progress) as run:
        _note_risks(run)
        try:
            steps = backend.train(run)
        except SavedInterrupt:
            raise SavedInterrupt(_stop_message(run)) from None
        except NothingToLearnError:
            raise
        except LightningError:
            if (saved := _resumable_step(run)) is not None:
                progress.note(f"saved after {amount(saved, 'step')}. Continue with: {_CONTINUE} {run.folder}")
            raise
        run.log.draw()
        return result_of(run, steps, time.monotonic() - began)


@contextmanager
def _open_run(config: TrainConfig, backend: Backend, progress: Progress) -> Iterator[OpenRun]:
    """Read what a run needs, and reject what is wrong with it; then open its folder, workers, store, judge and log."""
    rules, judging = _read_names(config)
    tasks = load_tasks(config.data, config.columns)
    val = load_tasks(config.val, config.columns) if config.val else []
    identity = identity_of(config, tasks)
    start = backend.start(config, identity)
    with ExitStack() as stack:
        check = stack.enter_context(defer_interrupts(progress.stopping))
        folder = stack.enter_context(_folder(config, start))
        runner = stack.enter_context(
            open_runner(
                Job.of(config, withheld=(folder, *files_of(config.store or ""))),
                workers=config.worker_count(),
                concurrency=config.concurrency,
                progress=progress,
                logs=folder / "logs",
            )
        )
        check()
        store = stack.enter_context(_store(config, folder))
        judge = stack.enter_context(open_judge(judging, store, seed=config.seed, cache=folder / CACHE_NAME))
        if start.checkpoint is not None:  # before the log loses the later steps
            mark_newest(folder, start.checkpoint)
        yield OpenRun(
            config=config,
            tasks=tasks,
            val=val,
            rules=rules,
            identity=identity,
            start=start,
            folder=folder,
            store=store,
            judge=judge,
            runner=runner,
            log=stack.enter_context(_log(config, folder, start.step, val)),
            progress=progress,
            check=check,
        )


def _read_names(config: TrainConfig) -> tuple[list[JudgeRule], JudgePlan | None]:
    """Return the rules and the judge that a configuration names; reject unknown options of those and of its credit."""
    trackers.check(config.trackers)
    credit_of(config)
    return (
        read_rules(config.rewards, credit=config.credit, gamma=config.gamma),
        read_judge(config.reward, config.judge),
    )


def _note_risks(run: OpenRun) -> None:
    """Note what the options and the tasks do to the result."""
    config = run.config
    if config.timeouts == "exclude":
        run.progress.note(LATE_LEFT_OUT)
    if both := count_shared(run.tasks, run.val):
        run.progress.note(
            f"WARNING: {both} of {len(run.val)} held-out tasks are also training tasks, so their reward also"
            f" rises by memorising. Remove the tasks of {config.val} from {config.data}."
        )


def describe(config: TrainConfig, progress: Progress | None = None) -> RunDescription:
    """Say what training would do and take. Nothing stays of what is tried for that.

    Raises:
        LightningError: an option or a file is wrong, or what was tried failed.
    """
    backend: Backend = registry.by_name("backend", config.backend)
    config = with_format(config)
    _read_names(config)
    return backend.describe(config, progress or Silent())


def _check_port(port: int) -> None:
    """Refuse a port that is in use before anything is begun; the server itself comes minutes later.

    Raises:
        ConfigError: it is.
    """
    from lightning_trainer.gateway.http.serving import ServerThread

    if port:
        ServerThread(None, port=port).check()


def _folder(config: TrainConfig, start: Start) -> AbstractContextManager[Path]:
    """Open the run's folder; a new one is removed if the run fails before it has begun."""
    if start.folder is not None and config.out is not None and config.out.resolve() != start.folder.resolve():
        raise ConfigError(f"a run is resumed in its own folder, {start.folder}, not in {config.out}. Leave --out out.")
    return run_folder(config.out, start.folder)


@contextmanager
def _store(config: TrainConfig, folder: Path) -> Iterator[Store]:
    """Open the store; what an earlier life of this run left in its own is cancelled: nobody waits for it any more."""
    with open_database(config.store or str(folder / STORE_NAME)) as store:
        if config.resume is not None and config.store is None:
            cancel_left_over(store)
        yield store


@contextmanager
def _log(config: TrainConfig, folder: Path, step: int, val: Sequence[Task]) -> Iterator[MetricLog]:
    held_out = f"{digest(val)}*{config.val_samples}" if val else None
    with (
        trackers.open_trackers(config.trackers, folder, without_passwords(config.model_dump(mode="json"))) as told,
        closing(MetricLog(folder, from_step=step, trackers=told, held_out=held_out)) as log,
    ):
        yield log


def _resumable_step(run: OpenRun) -> int | None:
    """Return the step of the newest checkpoint; None if there is none with what resuming needs."""
    newest = run.folder / NEWEST
    if (checkpoint := verl_checkpoint(newest)) is not None:
        return step_of(checkpoint)
    try:
        state = read_state(newest) if newest.exists() else None
    except LightningError:  # a checkpoint of a backend that keeps another state
        return None
    return state.step if state is not None and state.resumable else None


def _stop_message(run: OpenRun) -> str:
    taken = len(run.log.lines("train"))
    steps = amount(taken, "step")
    if not (run.folder / NEWEST).exists():
        return f"stopped after {steps}, before anything was learned"
    newest = (run.folder / NEWEST).resolve()
    if (saved := _resumable_step(run)) is None:
        return f"stopped after {steps}. The weights are in {newest}, without what --resume needs (--checkpoint weights)"
    lost = f", {taken - saved} of them since the last checkpoint" if taken > saved else ""
    return f"stopped after {steps}{lost}. Continue with: {_CONTINUE} {run.folder}"
