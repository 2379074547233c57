"""`rejection_sampling()`: open what rounds need, start or resume them, and stop on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from lightning_spans.errors import NothingToLearnError, UnknownAgentError
from lightning_trainer import registry
from lightning_trainer.backend_protocol import Backend
from lightning_trainer.config.origin import with_format
from lightning_trainer.config.workers import worker_count
from lightning_trainer.gateway.engine import tool_format
from lightning_trainer.gateway.prompt.template import check_calls
from lightning_trainer.judges import CACHE_NAME, open_judge, read_judge
from lightning_trainer.kits.sft.config import OF_FILES, RoundsConfig, with_current_names
from lightning_trainer.kits.sft.fit import schedule
from lightning_trainer.kits.sft.lineage import LineageWriter
from lightning_trainer.kits.sft.resume import CHECKPOINT, began_with, learning_folder
from lightning_trainer.kits.sft.rounds.loop import RoundLoop
from lightning_trainer.kits.sft.rounds.state import STATE_NAME, Rounds, RoundsState
from lightning_trainer.kits.sft.sft import options_of
from lightning_trainer.lineage.facts import read_facts
from lightning_trainer.lineage.manifest import RunFacts
from lightning_trainer.models import look
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.endings import LATE_LEFT_OUT
from lightning_trainer.run.data import digest, load_tasks
from lightning_trainer.run.interrupts import SavedInterrupt, defer_interrupts
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.folder import check_unchanged
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import STORE_NAME, cancel_left_over, open_database, open_runner, serve


def rejection_sampling(
    config: RoundsConfig,
    progress: Progress | None = None,
    *,
    resume: Path | None = None,
    before_removal: Callable[[Path], None] | None = None,
) -> Rounds:
    """Sample, keep the best attempts, learn them, and repeat.

    Args:
        config: the options; to resume, those that `config_to_resume` returned.
        progress: callback for progress events. Default: none.
        resume: folder of rounds to resume, after the last completed one.
        before_removal: called with the folder, which has the samples, if there is nothing to learn, or no agent made a
            call.

    Raises:
        LightningError: an option, a file or the agent is wrong, or the first round has nothing to learn. Then no folder
            is left.
        SavedInterrupt: the program was asked to stop; what was learned is saved.
    """
    began, progress = time.monotonic(), progress or Silent()
    backend: Backend = registry.by_name("backend", config.backend)
    look(config.model)  # raises if the model is not found
    config = config if resume is not None else with_format(config)
    tasks = load_tasks(config.tasks, config.columns)
    val = load_tasks(config.val, config.columns) if config.val else []
    judging = read_judge(config.reward, config.judge)
    data = digest([*tasks, *val])
    with ExitStack() as stack:
        check = stack.enter_context(defer_interrupts(progress.stopping))
        folder = stack.enter_context(learning_folder(config.out, resume))
        state = RoundsState(data=data) if resume is None else _resumable(folder, data)
        runner = stack.enter_context(_runner_of(config, len(tasks), progress, folder))
        check()
        store = stack.enter_context(open_database(str(folder / STORE_NAME)))
        cancel_left_over(store)
        judge = stack.enter_context(open_judge(judging, store, seed=config.seed, cache=folder / CACHE_NAME))
        progress.phase(f"loading {config.model}")
        learner = stack.enter_context(closing(backend.learner(config.model, _options(config, len(tasks)))))
        check_calls(learner.engine.tokenizer, tool_format(learner.engine))
        if state.weights:
            learner.load(folder / state.weights)
        log = stack.enter_context(closing(MetricLog(folder, from_step=state.steps)))
        if config.timeouts == "exclude":
            progress.note(LATE_LEFT_OUT)
        answers = AnswerSource.of(learner.engines, config.policies)
        session = stack.enter_context(
            serve(store, runner, answers, _sampling(config), timeouts=config.timeouts, failed=config.failed)
        )
        loop = RoundLoop(
            config=config, tasks=tasks, val=val, folder=folder, session=session, learner=learner, judge=judge,
            log=log, progress=progress, check=check, state=state, steps=state.steps,
            lineage=LineageWriter(folder, _facts(config), state.steps), began=began - state.seconds,
        )  # fmt: skip
        return _run(loop, before_removal)


def _run(loop: RoundLoop, before_removal: Callable[[Path], None] | None) -> Rounds:
    try:
        return loop.run()
    except SavedInterrupt:
        raise SavedInterrupt(_stop_message(loop.folder)) from None
    except (NothingToLearnError, UnknownAgentError):
        if before_removal is not None:
            before_removal(loop.folder)
        raise


def _runner_of(config: RoundsConfig, tasks: int, progress: Progress, folder: Path) -> AbstractContextManager[Runner]:
    at_once = 1 if config.isolate else config.concurrency
    workers = worker_count(config.workers, tasks * config.samples, at_once)
    job = Job.of(config, withheld=(folder,))
    return open_runner(job, workers=workers, concurrency=config.concurrency, progress=progress, logs=folder / "logs")


def _stop_message(folder: Path) -> str:
    saved = (folder / CHECKPOINT).exists()
    what = f"what was learned is in {folder / CHECKPOINT}" if saved else "before anything was learned"
    done = (folder / STATE_NAME).exists()
    then = f". Continue after the last round with: lightning-rl sft --resume {folder}" if done else ""
    return f"stopped: {what}{then}"


def config_to_resume(folder: Path, again: Mapping[str, Any] | None = None) -> RoundsConfig:
    """Return the options of rounds to resume; see `began_with`.

    Raises:
        ConfigError: there are none, or one that had a password is not given again.
    """
    RoundsState.read(folder)  # raises if there is no state
    kept = with_current_names(began_with(folder, again))
    return RoundsConfig(**{name: value for name, value in kept.items() if name not in OF_FILES})


def _resumable(folder: Path, data: str) -> RoundsState:
    state = RoundsState.read(folder)
    check_unchanged(folder, {"tasks": state.data}, {"tasks": data})
    return state


def _options(config: RoundsConfig, tasks: int) -> dict[str, object]:
    """Return the learner's options.

    The number of steps is not known, so the learning rate rises and then stays constant.
    """
    steps = config.rounds * (config.steps or max(1, tasks * config.kept // config.batch_size))
    return {"warmup_steps": schedule(steps)[0], **options_of(config)}


def _facts(config: RoundsConfig) -> RunFacts:
    data, program = [config.tasks, config.val], config.target or config.command
    return read_facts(config.model_dump(mode="json"), model=str(config.model), data=data, program=program)


def _sampling(config: RoundsConfig) -> SamplingOptions:
    return SamplingOptions(
        agents=config.agents,
        temperature=config.temperature,
        plain=True,
        max_tokens=config.answer_tokens,
        seed=config.seed,
        name_by=config.name_by,
    )
