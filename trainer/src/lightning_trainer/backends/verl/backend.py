"""The backend named ``verl``: serves store and gateway here, next to verl's trainer, which takes the steps."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_spans.errors import ConfigError
from lightning_trainer import models
from lightning_trainer.backend_protocol import OpenRun, RunDescription, Start
from lightning_trainer.backends.verl.options import describe
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.backends.verl.options.packing import has_flash_attention
from lightning_trainer.backends.verl.process import run_verl
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.resuming import find_checkpoint, make_newest, note_identity
from lightning_trainer.backends.verl.serving import serving
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.shape import read_shape
from lightning_trainer.models.verl_folders import step_of
from lightning_trainer.report.progress import Progress


class VerlBackend:
    """`Backend` on verl's trainer and vLLM. verl and Ray are imported when a run starts."""

    def start(self, config: TrainConfig, identity: Mapping[str, Any]) -> Start:
        """Reject what cannot work, including verl's own options, and find the state to resume from: `Backend.start`."""
        _need_verl()
        _need_a_trl_that_fits()
        _need_room_for_ray()
        config = resolve_model(config, fetch=False)
        if config.device == "cpu":
            from lightning_trainer.backends.verl.plugin import use_cpu  # imports verl if the environment says so

            use_cpu()
        site = Site(folder=(config.out or Path.cwd()).absolute(), steps=describe.count_steps(config))
        shape, flash = read_shape(config.model), has_flash_attention()
        describe.compose_options(overrides(config, site, shape, flash_attention=flash))
        if config.resume is None:
            return Start()
        checkpoint = find_checkpoint(config.resume, identity, accelerators=config.gpus * config.nodes)
        return Start(step=step_of(checkpoint), folder=checkpoint.parent.parent, checkpoint=checkpoint)

    def train(self, run: OpenRun) -> int:
        """Let verl take the steps: `Backend.train`. It cannot stop between two steps, so an interrupt ends it."""
        if run.start.checkpoint is not None:
            make_newest(run.folder, run.start.checkpoint)
        run = replace(run, config=resolve_model(run.config, fetch=True))
        reporter = Reporter(run.log, run.progress, run.config)

        def check() -> None:
            run.check()
            run.runner.check()

        with serving(run, reporter) as site:
            run.begin()
            run.progress.begin(run.start.step, run.steps)
            note_identity(run.folder, run.identity)
            run.progress.phase("starting verl and vLLM")
            run_verl(run.config, site, check)
        reporter.warn_of_unheard(run.steps)
        return run.steps

    def learner(self, model: str, options: Mapping[str, Any]) -> NoReturn:  # noqa: ARG002 - the protocol's signature
        """Refuse: verl learns in its own processes, from its own files: `Backend.learner`."""
        raise ConfigError(
            "verl learns from data by its own trainer, not by this command. Write the conversations with"
            " `lightning-rl export --format sft --no-ids DATA.jsonl`, and give them to `verl.trainer.sft_trainer`:"
            " docs/how-to/sft.md has the commands. Its checkpoint is a --model for train --backend verl. Or use"
            " --backend torch."
        )

    def describe(self, config: TrainConfig, progress: Progress) -> RunDescription:  # noqa: ARG002 - nothing is tried
        """Describe verl's options and what the run needs: `Backend.describe`."""
        return RunDescription(describe.describe(resolve_model(config, fetch=False)))


def resolve_model(config: TrainConfig, *, fetch: bool) -> TrainConfig:
    """Return the configuration with the absolute path of its model's folder, for processes elsewhere.

    A hub id without a revision stays, so that each machine fetches the model itself.

    Args:
        config: of the run.
        fetch: whether a missing model is fetched or made; otherwise its name stays unchanged.

    Raises:
        ConfigError: there is no such model.
    """
    model = models.look(config.model)
    if model.kind == "hub" and model.revision is None:
        return config
    folder = models.resolve(config.model) if fetch else model.folder
    return config if folder is None else config.model_copy(update={"model": str(folder.absolute())})


def _need_verl() -> None:
    for package in ("verl", "ray", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'{package} is not installed here. Run: pip install "lightning-trainer[verl]"')


def _need_a_trl_that_fits() -> None:
    """Reject a trl without the class that verl patches in any installed trl: verl's workers would fail on it."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return
    package = Path(found.origin)  # read, not imported: an import takes seconds, and changes what verl finds
    if (package.parent / "experimental" / "ppo").is_dir() or "WithValueHead" in package.read_text("utf-8"):
        return
    raise ConfigError(
        f"verl does not work with this trl ({package}): its workers look in it for the class"
        ' AutoModelForCausalLMWithValueHead, which it no longer has. Run: pip install "trl==0.27.0", or: pip'
        " uninstall trl"
    )


def _need_room_for_ray() -> None:
    """Reject a temporary folder in which Ray's workers refuse to start, because Ray would wait for them forever."""
    environment = os.environ.get("VIRTUAL_ENV")
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").resolve()  # noqa: S108 - Ray's
    if environment and folder.is_relative_to(Path(environment).resolve()):
        raise ConfigError(
            f"temporary files go to {folder}, inside the virtual environment {environment}, where Ray does not work."
            " Set RAY_TMPDIR to another folder, such as /tmp."
        )
