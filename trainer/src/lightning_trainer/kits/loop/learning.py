"""Training and evaluation: the functions of `train` and `eval`, in sub-folders of the round."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_spans.errors import AgentFailedError, NothingToLearnError
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.evaluate import evaluate, resumed
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.record import LoopRound, StageResult
from lightning_trainer.kits.loop.selection import HELD_OUT_NAME, TRAIN_NAME
from lightning_trainer.models import NEWEST
from lightning_trainer.report.progress import Progress
from lightning_trainer.run.folders import read_config
from lightning_trainer.run.train import train

# Options of a run that its evaluation also uses.
_SHARED = (
    "target", "reward", "temperature", "max_tokens", "sampling", "seed", "timeout_s", "max_attempts", "workers",
    "concurrency", "isolate", "name_by", "work", "agents",
)  # fmt: skip


def learn(config: LoopConfig, current: LoopRound, model: str | None, progress: Progress) -> StageResult:
    """Train the agent on the tasks of a round, resuming where an interrupted process stopped.

    Args:
        config: configuration of the loop.
        current: the round.
        model: the model that an earlier round promoted; None: the configured model.
        progress: callback for progress events.
    """
    out = current.folder / "run"
    run = config.run(current.folder / TRAIN_NAME, out, model)
    if (out / NEWEST).exists():
        run = TrainConfig(**{**read_config(out), "resume": out})
    else:
        shutil.rmtree(out, ignore_errors=True)
    try:
        result = train(run, progress)
    except NothingToLearnError as error:
        return StageResult({}, "rejected", f"nothing to learn: {error}")
    checkpoint = result.best or result.checkpoint
    if checkpoint is None:
        return StageResult({}, "rejected", "the run learned nothing")
    return StageResult({"steps": result.steps, "model": str(run.model), "checkpoint": str(checkpoint.resolve())})


def compare(config: LoopConfig, current: LoopRound, progress: Progress) -> StageResult:
    """Evaluate the candidate on the held-out tasks, compared with the model that it must not be worse than."""
    out, learned = current.folder / "evaluation", current.facts("train")
    if files.is_evaluation(out):
        result = evaluate(resumed(out), progress, resume=out)
    else:
        shutil.rmtree(out, ignore_errors=True)
        run = config.run(current.folder / TRAIN_NAME, current.folder / "run", learned["model"])
        result = evaluate(_options(config, run, current.folder / HELD_OUT_NAME, learned["checkpoint"], out), progress)
    if result.failure is not None:
        raise AgentFailedError(result.failure)
    found = result.to_json()
    kept = ("difference", "difference_low", "difference_high", "difference_tasks", files.PROGRAM)
    facts = {name: found[name] for name in kept}
    difference, least = facts["difference"], config.evaluate.min_difference
    if difference is None or difference < least:
        shown = "unknown" if difference is None else f"{difference:+.3f}"
        reason = f"the difference on the held-out tasks is {shown}, and evaluate.min_difference is {least:+.3f}"
        return StageResult(facts, "rejected", reason)
    return StageResult(facts)


def _options(config: LoopConfig, run: TrainConfig, tasks: Path, checkpoint: str, out: Path) -> EvalConfig:
    return EvalConfig(
        data=tasks,
        model=checkpoint,
        against=config.evaluate.against or run.model,
        samples=config.evaluate.samples,
        counting=Counting(failed=run.failed, timeouts=run.timeouts, agents=run.agents, declared=run.declared),
        out=out,
        **{name: getattr(run, name) for name in _SHARED},
    )
