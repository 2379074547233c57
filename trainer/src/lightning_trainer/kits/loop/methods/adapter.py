"""`[train] method = "train"`: train an adapter of the agent."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError, NothingToLearnError
from lightning_trainer.config.files import merge
from lightning_trainer.config.loading import load_options
from lightning_trainer.config.passwords import with_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.kits.loop.methods.method import CHECKPOINT, MODEL, RoundInput
from lightning_trainer.kits.loop.record import StageResult
from lightning_trainer.models import NEWEST
from lightning_trainer.report.progress import Progress
from lightning_trainer.run.folders import read_config
from lightning_trainer.run.train import train
from lightning_trainer.runner.target import JUDGE

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

# Options of a run that its evaluation also uses.
_SHARED: Final = (
    "target", "reward", "temperature", "max_tokens", "sampling", "seed", "timeout_s", "max_attempts", "workers",
    "concurrency", "isolate", "name_by", "work", "agents",
)  # fmt: skip
_OWNED: Final = ("target", "command", "env", "data", "val", "out", "resume", "store", "agents", "policies")


def run_options(config: LoopConfig, given: RoundInput, **more: Any) -> TrainConfig:
    """Return the options of a training run of a round."""
    own = {"target": config.target, "data": given.data, "agents": (config.agent,)}
    model = {} if given.model is None else {"model": given.model}
    return merge(None, {**config.method_options, **own, **more, **model})


def check_run_options(options: Mapping[str, Any], run: TrainConfig) -> None:
    """Reject options that the loop sets itself, and judges.

    Raises:
        ConfigError: there is one.
    """
    if owned := [name for name in options if name in _OWNED]:
        raise ConfigError(f"train.{owned[0]}: the loop sets this option. Leave it out.")
    if run.judge or run.reward == JUDGE:
        raise ConfigError(
            "train.reward: a judge ranks rollouts of one task against each other, so two models can't be compared."
            ' Give a reward that scores one rollout by itself: reward = "module:function".'
        )


def eval_options_of(run: TrainConfig) -> dict[str, Any]:
    """Return how an evaluation loads the models of a run, and runs and scores its program."""
    counting = Counting(failed=run.failed, timeouts=run.timeouts, agents=run.agents, declared=run.declared)
    return {"counting": counting, "load": load_options(run), **{name: getattr(run, name) for name in _SHARED}}


class AdapterMethod:
    """Trains an adapter, with all options of `train`."""

    needs_base = True
    forecast_by = "train"

    def check(self, config: LoopConfig) -> None:
        """Reject invalid options."""
        run = self._run(config, RoundInput(data=Path("train.jsonl"), out=Path("run")))
        check_run_options(config.method_options, run)
        if run.checkpoint == "weights":
            raise ConfigError(
                "train.checkpoint: a run that saves only weights can't be resumed. Leave it out, or use newest."
            )

    def learn(self, config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:
        """Train, or resume the run."""
        run = self._run(config, given)
        if (given.out / NEWEST).exists():
            kept = with_passwords(read_config(given.out), run.model_dump(mode="json"))
            run = TrainConfig(**{**kept, "resume": given.out})
        else:
            shutil.rmtree(given.out, ignore_errors=True)
        try:
            result = train(run, progress)
        except NothingToLearnError as error:
            return StageResult({}, "rejected", f"nothing to learn: {error}")
        checkpoint = result.best or result.checkpoint
        if checkpoint is None:
            return StageResult({}, "rejected", "the run learned nothing")
        return StageResult({"steps": result.steps, MODEL: str(run.model), CHECKPOINT: str(checkpoint.resolve())})

    def eval_options(self, config: LoopConfig, given: RoundInput) -> Mapping[str, Any]:
        """Return the run's own options."""
        return eval_options_of(self._run(config, given))

    def cost(self, config: LoopConfig, given: RoundInput, tasks: int) -> Mapping[str, int]:
        """Return the steps and rollouts."""
        run = self._run(config, given)
        steps = run.step_count(max(1, tasks))
        return {"steps": steps, "rollouts": steps * run.batch_size * run.group_size}

    def _run(self, config: LoopConfig, given: RoundInput) -> TrainConfig:
        return run_options(config, given, out=given.out, policies={config.agent: "lora"})
