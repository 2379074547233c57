"""`train()` on verl: opens store, gateway and runner here, starts verl beside them, and closes everything again."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_spans import plugins
from lightning_spans.errors import ConfigError
from lightning_trainer import trackers
from lightning_trainer.backends.verl.describe import composed, count_steps, has_flash_attention
from lightning_trainer.backends.verl.gateway import serving
from lightning_trainer.backends.verl.overrides import Place, overrides
from lightning_trainer.backends.verl.plugin import use_cpu
from lightning_trainer.backends.verl.process import run_verl
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.resuming import newest_checkpoint, note_identity
from lightning_trainer.backends.verl.shape import read_shape
from lightning_trainer.config import TrainConfig, to_json
from lightning_trainer.data import load_tasks
from lightning_trainer.folders import CONFIG_NAME, STORE_NAME, make_folder
from lightning_trainer.local import opened
from lightning_trainer.metrics import MetricLog, write_atomically
from lightning_trainer.progress import Progress, Silent
from lightning_trainer.runner import Runner
from lightning_trainer.target import Job

if TYPE_CHECKING:
    from lightning_trainer.training import Result

logger = logging.getLogger(__name__)
KEY_NAME: Final = "admin.key"
RUNNER_KEY_NAME: Final = "runner.key"  # for runners on other machines; it can claim and end rollouts, and no more
_LOOK_S: Final = 0.5
_END_S: Final = 60.0


def run(config: TrainConfig, progress: Progress | None = None) -> Result:
    """Train on verl; see `lightning_trainer.train`.

    verl can't be stopped between two steps: Ctrl-C ends it at once, and the run goes on from its last checkpoint.

    Raises:
        LightningError: an option, a file or the agent is wrong, there is nothing to learn, or a part of verl failed.
    """
    from lightning_trainer.training import Result

    began, progress = time.monotonic(), progress or Silent()
    _need_verl()
    _need_room_for_ray()
    if config.device == "cpu":
        use_cpu()
    if config.val is not None:
        load_tasks(config.val)
    steps = count_steps(config)
    place = Place(folder=(config.out or Path.cwd()).absolute(), steps=steps)
    composed(overrides(config, place, read_shape(config.model), flash_attention=has_flash_attention()))  # or refuse
    checkpoint = newest_checkpoint(config) if config.resume else None
    plugins.load_all()
    with ExitStack() as stack:
        folder = checkpoint.parent.parent if checkpoint else make_folder(config.out)
        progress.phase("importing the agent")
        runner = stack.enter_context(_runner(config, folder))
        told = stack.enter_context(trackers.opened(config.trackers, folder, config.model_dump(mode="json")))
        log = stack.enter_context(closing(MetricLog(folder, from_step=_step_of(checkpoint), trackers=told)))
        reporter = Reporter(log, progress, config.agents)
        store = stack.enter_context(opened(config.store or str(folder / STORE_NAME)))
        place = Place(folder=folder.absolute(), steps=steps, resume=checkpoint and checkpoint.absolute())
        place = stack.enter_context(serving(config, place, store, runner, reporter))
        write_atomically(folder / CONFIG_NAME, to_json(config.model_copy(update={"out": folder})).encode())
        note_identity(folder, config)
        progress.phase("starting verl and vLLM")
        run_verl(config, place, runner)
        reporter.warn_of_unheard(steps)
        log.draw()
        newest = folder / "checkpoint"
        return Result(
            before=reporter.score_at(0),
            after=reporter.score_at(steps),
            curve=reporter.curve(steps),
            steps=steps,
            checkpoint=newest if newest.exists() else None,
            folder=folder,
            seconds=time.monotonic() - began,
            alarms=tuple(log.raised()),
        )


def _need_verl() -> None:
    for package in ("verl", "ray", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'{package} is not installed here. Run: pip install "lightning-trainer[verl]"')


def _need_room_for_ray() -> None:
    """Refuse a temporary folder in which Ray's workers refuse to start, while Ray would wait for them for ever."""
    environment = os.environ.get("VIRTUAL_ENV")
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").resolve()  # noqa: S108 - Ray's
    if environment and folder.is_relative_to(Path(environment).resolve()):
        raise ConfigError(
            f"temporary files go to {folder}, inside the virtual environment {environment}, where Ray does not work."
            " Set RAY_TMPDIR to another folder, such as /tmp."
        )


@contextmanager
def _runner(config: TrainConfig, folder: Path) -> Iterator[Runner]:
    job = Job(target=config.target, command=config.command, reward=config.reward)
    runner = Runner(job, workers=config.worker_count(), concurrency=config.concurrency, logs=folder / "logs")
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("global_step_"))
