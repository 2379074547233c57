"""`train()`: opens what a run needs, runs the loop, closes everything again."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spans import plugins
from lightning_spans.errors import ConfigError
from lightning_spans.store import RolloutStatus, Store
from lightning_trainer import trackers
from lightning_trainer.air import installed, read_rules
from lightning_trainer.alarms import Alarm
from lightning_trainer.algorithms import algorithm_by_name
from lightning_trainer.backends import Backend, open_backend
from lightning_trainer.checkpoints import NEWEST, State, check_identity, find, read_state
from lightning_trainer.config import TrainConfig, to_json
from lightning_trainer.data import Task, digest, load_tasks
from lightning_trainer.folders import CONFIG_NAME, STORE_NAME, make_folder
from lightning_trainer.interrupts import Interrupted, deferred
from lightning_trainer.local import Local, opened, serving
from lightning_trainer.loop import Loop, Parts
from lightning_trainer.metrics import MetricLog, write_atomically
from lightning_trainer.policies import parse
from lightning_trainer.progress import Progress, Silent
from lightning_trainer.recipes import recipe_of
from lightning_trainer.runner import Runner
from lightning_trainer.scores import Score
from lightning_trainer.target import Job

UNKNOWN_POLICY = "policy"  # asked for by calls whose agent has none, where agents have their own: such are refused
OPEN: tuple[RolloutStatus, ...] = ("queued", "running")
UNNAMED = "agent"  # name of the one agent of a command that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to.

    Attributes:
        before: held-out score before training; None without held-out tasks.
        after: held-out score after it.
        curve: mean training reward of each step; None where no rollout counted.
        steps: steps taken.
        checkpoint: the newest checkpoint, which `lightning-rl serve` takes; None where nothing was learned.
        folder: the run's.
        seconds: time that the run took, earlier parts of a resumed run included.
        alarms: every alarm of the run, in the order in which they were raised.
    """

    before: Score | None
    after: Score | None
    curve: tuple[float | None, ...]
    steps: int
    checkpoint: Path | None
    folder: Path
    seconds: float
    alarms: tuple[Alarm, ...] = ()

    @property
    def reward_before(self) -> float | None:
        """Mean held-out reward before training; without held-out tasks, of the first step's rollouts."""
        return self.before.reward if self.before else self.curve[0] if self.curve else None

    @property
    def reward_after(self) -> float | None:
        """Mean held-out reward after training; without held-out tasks, of the last step's rollouts."""
        return self.after.reward if self.after else self.curve[-1] if self.curve else None


def train(config: TrainConfig, progress: Progress | None = None) -> Result:
    """Train the agents that a configuration names.

    Ctrl-C or SIGTERM ends the step that is under way, saves, and raises `KeyboardInterrupt`; a second one ends the
    program at once.

    Args:
        config: what, on what, and how.
        progress: told what happens; by default nobody is.

    Returns:
        Rewards before and after, the curve, and where the checkpoint is.

    Raises:
        LightningError: an option, a file or the agent is wrong, or there is nothing to learn. What was learned until
            then is saved.
    """
    if config.backend == "verl":  # its trainer drives, and takes the steps itself
        from lightning_trainer.backends.verl.run import run

        return run(config, progress)
    began, progress = time.monotonic(), progress or Silent()
    tasks, val = load_tasks(config.data), load_tasks(config.val) if config.val else []
    plugins.load_all()
    algorithm = algorithm_by_name(config)
    rules = read_rules(config.rewards, credit=config.credit, gamma=config.gamma)
    checkpoint, state = _starting_point(config, _identity(config, tasks))
    with ExitStack() as stack:
        check = stack.enter_context(deferred())
        stack.enter_context(installed(rules))
        folder = stack.enter_context(_run_folder(config, checkpoint))
        runner = stack.enter_context(_runner(config, folder, progress))
        check()
        backend = stack.enter_context(_backend(config, checkpoint, progress))
        check()
        parts = Parts(
            config=config,
            tasks=tasks,
            val=val,
            local=stack.enter_context(_local(config, folder, runner, backend)),
            backend=backend,
            algorithm=algorithm,
            log=stack.enter_context(_log(config, folder, state.step)),
            progress=progress,
            check=check,
            folder=folder,
            name=f"{folder.name}-{uuid.uuid4().hex[:8]}",
        )
        write_atomically(folder / CONFIG_NAME, to_json(config.model_copy(update={"out": folder})).encode())
        loop = Loop(parts, state)
        try:
            loop.run()
        except Interrupted:
            raise Interrupted(_stopped(loop.state, folder)) from None
        parts.log.draw()
        return _result(loop.state, parts.log, folder, state.seconds + time.monotonic() - began)


def _identity(config: TrainConfig, tasks: Sequence[Task]) -> dict[str, Any]:
    """Give what must stay the same for a run to go on."""
    return {
        "data": digest(tasks),
        "batch_size": config.batch_size,
        "group_size": config.group_size,
        "seed": config.seed,
    }


def _starting_point(config: TrainConfig, identity: dict[str, Any]) -> tuple[Path | None, State]:
    if config.resume is None:
        return None, State(step=0, identity=identity)
    run, checkpoint = find(config.resume)
    if config.out is not None and config.out.resolve() != run:
        raise ConfigError(f"a run goes on in its own folder, {run}, not in {config.out}. Leave --out away.")
    state = read_state(checkpoint)
    check_identity(state, identity, checkpoint)
    return checkpoint, state


@contextmanager
def _run_folder(config: TrainConfig, checkpoint: Path | None) -> Iterator[Path]:
    """Give the run's folder; a new one goes again when the run fails before its first rollout."""
    if checkpoint is not None:
        yield checkpoint.parent.parent
        return
    existed = config.out is not None and config.out.exists()
    folder = make_folder(config.out)
    try:
        yield folder
    except BaseException:
        if not (folder / CONFIG_NAME).exists():  # written when everything has been opened
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not existed:
                folder.rmdir()
        raise


@contextmanager
def _runner(config: TrainConfig, folder: Path, progress: Progress) -> Iterator[Runner]:
    progress.phase("importing the agent")
    job = Job(target=config.target, command=config.command, reward=config.reward)
    runner = Runner(job, workers=config.worker_count(), concurrency=config.concurrency, logs=folder / "logs")
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()


@contextmanager
def _backend(config: TrainConfig, checkpoint: Path | None, progress: Progress) -> Iterator[Backend]:
    progress.phase(f"loading {config.model}")
    backend = open_backend(config.backend, config.model, backend_options(config))
    try:
        if checkpoint is not None:
            backend.load(checkpoint)
        yield backend
    finally:
        backend.close()


def backend_options(config: TrainConfig) -> dict[str, Any]:
    """Give the options of the backend: those that every run has, and those named for it alone.

    Raises:
        ConfigError: an option is given twice.
    """
    shared = (
        "chat_template", "clip_high", "clip_low", "device", "dtype", "kl_coef", "learning_rate", "lora_alpha",
        "lora_rank", "loss_aggregation", "max_grad_norm", "max_model_len", "seed",
    )  # fmt: skip
    options = {name: getattr(config, name) for name in shared} | _learning(config)
    if config.policies:
        own = parse(config.policies)
        options |= {"adapters": own.adapters, "fixed": tuple(sorted(own.fixed))}
    for name in config.backend_options:
        if name in options:
            raise ConfigError(f"backend_options: {name} is an option of its own. Write it outside backend_options.")
    return {**options, **config.backend_options}


def _learning(config: TrainConfig) -> dict[str, Any]:
    """Give what an algorithm asks of the backend beyond GRPO; a backend that knows none of it never hears of it."""
    recipe = recipe_of(config.algorithm)
    asked: dict[str, Any] = {"policy_loss": recipe.loss, "critic": recipe.critic, "entropy_coef": config.entropy_coef}
    asked |= {"kl_in": config.kl_in, "kl_estimator": config.kl_estimator} if config.kl_coef > 0 else {}
    plain = {"policy_loss": "clip", "critic": False, "entropy_coef": 0.0, "kl_in": "loss", "kl_estimator": "k3"}
    of_critic = {name: getattr(config, name) for name in ("gae_lambda", "value_learning_rate", "value_clip")}
    return {name: value for name, value in asked.items() if value != plain[name]} | {
        name: value for name, value in of_critic.items() if value is not None
    }


@contextmanager
def _log(config: TrainConfig, folder: Path, step: int) -> Iterator[MetricLog]:
    with (
        trackers.opened(config.trackers, folder, config.model_dump(mode="json")) as told,
        closing(MetricLog(folder, from_step=step, trackers=told)) as log,
    ):
        yield log


@contextmanager
def _local(config: TrainConfig, folder: Path, runner: Runner, backend: Backend) -> Iterator[Local]:
    from lightning_trainer.server.settings import Routing

    own = parse(config.policies)
    routing = Routing(
        agents=tuple(own.by_agent) or config.agents or ("*",),
        model=UNKNOWN_POLICY if own.by_agent else backend.engine.model,
        policies=own,
        seed=config.seed,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        unnamed=_unnamed(config),
    )
    with (
        opened(config.store or str(folder / STORE_NAME)) as store,
        _own_queue(config, store),
        serving(store, runner, routing=routing, engine=backend.engines, port=config.port) as local,
    ):
        yield local


@contextmanager
def _own_queue(config: TrainConfig, store: Store) -> Iterator[None]:
    """Cancel what an earlier life of this run left in its own store: nobody waits for it any more."""
    if config.resume is not None and config.store is None:
        store.cancel([r.rollout_id for status in OPEN for r in store.rollouts(status=status)])
    yield


def _unnamed(config: TrainConfig) -> str | None:
    """Name the agent of a command's calls that nothing names: the only one selected, or `agent`."""
    if config.command is None:
        return None
    if config.agents is None:
        return UNNAMED
    return config.agents[0] if len(config.agents) == 1 and not set("*?[") & set(config.agents[0]) else None


def _stopped(state: State, folder: Path) -> str:
    steps = "1 step" if state.step == 1 else f"{state.step} steps"
    if not (folder / NEWEST).exists():
        return f"stopped after {steps}, before anything was learned"
    return f"stopped after {steps}. Go on with: lightning-rl train --resume {folder}"


def _result(state: State, log: MetricLog, folder: Path, seconds: float) -> Result:
    scores = {line["step"]: Score.from_metrics(line) for line in log.lines("val")}
    newest = folder / NEWEST
    return Result(
        before=scores.get(0),
        after=scores.get(state.step),
        curve=state.rewards,
        steps=state.step,
        checkpoint=newest if newest.exists() else None,
        folder=folder,
        seconds=seconds,
        alarms=tuple(log.raised()),
    )
