"""The stages `train` and `evaluate`, in sub-folders of the round."""

from __future__ import annotations

import os
import shutil
from typing import Final

from lightning_spans.errors import AgentFailedError
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import BearerKeys, EvalConfig
from lightning_trainer.kits.evaluation.evaluate import config_to_resume, evaluate
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.methods.method import CHECKPOINT, ENDPOINT, MODEL, PROMPTS, RoundInput
from lightning_trainer.kits.loop.methods.names import find_method
from lightning_trainer.kits.loop.record import LoopRound, StageResult
from lightning_trainer.kits.loop.selection import HELD_OUT_NAME, TRAIN_NAME
from lightning_trainer.report.progress import Progress

_DIFFERENCES: Final = ("difference", "difference_low", "difference_high", "difference_tasks")


def input_of(current: LoopRound, model: str | None = None, stable: str | None = None) -> RoundInput:
    """Return what a round learns from; see `RoundInput`."""
    return RoundInput(data=current.folder / TRAIN_NAME, out=current.folder / "run", model=model, stable=stable)


def learn(config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:
    """Make the candidate by the configured method."""
    return find_method(config.method).learn(config, given, progress)


def compare(config: LoopConfig, current: LoopRound, progress: Progress) -> StageResult:
    """Evaluate the candidate on the held-out tasks, compared with the model that it must not be worse than."""
    out, key = current.folder / "evaluation", os.environ.get("LIGHTNING_UPSTREAM_KEY")
    keys = BearerKeys(endpoint=key, against=key)
    if files.is_evaluation(out):
        again = _options(config, current).to_json()
        result = evaluate(config_to_resume(out, again), progress, resume=out, keys=keys)
    else:
        shutil.rmtree(out, ignore_errors=True)
        result = evaluate(_options(config, current).with_values(out=out), progress, keys=keys)
    if result.failure is not None:
        raise AgentFailedError(result.failure)
    found = result.to_json()
    facts = {name: found[name] for name in (*_DIFFERENCES, files.PROGRAM)}
    difference, least = facts["difference"], config.evaluate.min_difference
    if difference is None or difference < least:
        shown = "unknown" if difference is None else f"{difference:+.3f}"
        reason = f"the difference on the held-out tasks is {shown}, and evaluate.min_difference is {least:+.3f}"
        return StageResult(facts, "rejected", reason)
    return StageResult(facts)


def _options(config: LoopConfig, current: LoopRound) -> EvalConfig:
    learned = current.facts("train")
    return EvalConfig(
        **find_method(config.method).eval_options(config, input_of(current)),
        data=current.folder / HELD_OUT_NAME,
        model=learned.get(CHECKPOINT) or learned.get(ENDPOINT) or learned[MODEL],
        prompts=learned.get(PROMPTS),
        against=config.evaluate.against or learned[MODEL],
        samples=config.evaluate.samples,
    )
