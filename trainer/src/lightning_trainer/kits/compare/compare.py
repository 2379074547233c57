"""`compare()`: measures the model as it is, lets each way spend its budget, and measures what each made."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError, LightningError, NothingToLearnError, UnknownAgentError
from lightning_spans.schema.agents import selects
from lightning_trainer.intervals import Estimate
from lightning_trainer.kits.compare.config import ASKED_NAME, CompareConfig
from lightning_trainer.kits.compare.methods import Made, learn, spent
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.evaluate import evaluate, resumed
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import Counting, Summary, difference, summarise, summarise_each
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import digest, load_tasks
from lightning_trainer.run.interrupts import Interrupted
from lightning_trainer.session.folder import open_folder

COMPARISONS: Final = Path("comparisons")  # where comparisons without a folder of their own go
BASE: Final = "base"
RESULT_NAME: Final = "comparison.json"  # in the folder: what it came to


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way, and what came of it.

    Attributes:
        made: by it, and what that took.
        summary: of the held-out tasks; None where it found nothing to learn.
        better: difference to the model as it is, task by task; None likewise.
    """

    made: Made
    summary: Summary | None = None
    better: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a comparison came to.

    Attributes:
        base: the held-out tasks with the model as it is.
        sides: the ways, in the order in which they were named.
        budget: rollouts that each might spend.
        folder: where it lies.
    """

    base: Summary
    budget: int
    folder: Path
    sides: Mapping[str, Side] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The way with the highest held-out reward, of those that are surely better than the model as it is."""
        sure = [
            (side.summary.reward.mean, name)
            for name, side in self.sides.items()
            if side.summary is not None and side.better is not None and (side.better.low or 0.0) > 0
        ]
        known = [(mean, name) for mean, name in sure if mean is not None]
        return max(known, key=lambda one: one[0])[1] if known else None

    def best_of(self, agent: str) -> str:
        """Return the way after which an agent earned most, `base` where that is the model as it is."""
        summaries: dict[str, Summary] = {BASE: self.base}
        summaries |= {name: side.summary for name, side in self.sides.items() if side.summary is not None}
        means = [(each.by_agent[agent].reward.mean, name) for name, each in summaries.items() if agent in each.by_agent]
        known = [(mean, name) for mean, name in means if mean is not None]
        return max(known, key=lambda one: one[0], default=(0.0, BASE))[1]

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl compare --json` prints."""
        methods = {}
        for name, side in self.sides.items():
            told = {**side.made.to_json(), "seconds": round(side.made.seconds, 1)}
            if side.summary is not None and side.better is not None:
                told |= {**side.summary.to_json(), "difference": side.better.mean}
                told |= {"difference_low": side.better.low, "difference_high": side.better.high}
                told["seconds"] = round(side.made.seconds, 1)
            methods[name] = told
        agents = {name: self.best_of(name) for name in self.base.by_agent if name}
        both = {"base": self.base.to_json(), "methods": methods, "best": self.best, "best_by_agent": agents}
        return {**both, "budget": self.budget, "folder": str(self.folder)}


def compare(
    config: CompareConfig, progress: Progress | None = None, *, out: Path | None = None, resume: Path | None = None
) -> Comparison:
    """Compare.

    A way that is done is kept, and one that was cut goes on where it can, when the comparison goes on.

    Args:
        config: what, on what, and how much; of one that goes on, what `config.read` returned.
        progress: callback for progress events. Default: none.
        out: folder; None: comparisons/DATE.
        resume: folder of a comparison to go on with.

    Raises:
        LightningError: an option, a file or the agent is wrong.
        Interrupted: somebody asked to stop.
    """
    progress = progress or Silent()
    config.check()
    marks = {
        "data": digest(load_tasks(config.train.data, config.train.columns)),
        "val": digest(load_tasks(_val(config), config.train.columns)),
    }
    with open_folder(
        out, resume, base=COMPARISONS, begun=_begun, resumable=lambda folder: (folder / ASKED_NAME).exists()
    ) as folder:
        _asked(folder, config, marks, resume)
        try:
            return _all(config, folder, progress)
        except Interrupted:
            raise Interrupted(f"stopped. Go on with: lightning-rl compare --resume {folder}") from None
        except LightningError as error:
            if not _begun(folder):
                raise
            raise type(error)(
                f"{error}\nWhat was measured until then is kept. Go on with: lightning-rl compare --resume {folder}"
            ) from error


def _all(config: CompareConfig, folder: Path, progress: Progress) -> Comparison:
    progress.note("the held-out tasks with the model as it is")
    drawn = {BASE: _measured(config, folder / BASE, config.train.model, None, progress)}
    chosen, counting = config.train.agents or ("*",), _counting(config)
    agents = summarise(drawn[BASE], counting).by_agent
    names = [name for name in agents if name and selects(chosen, name)]
    if not names:
        seen = ", ".join(filter(None, agents)) or "none that has a name"
        raise UnknownAgentError(f"no agent is called {', '.join(chosen)}. Agents seen: {seen}.")
    made_by: dict[str, Made] = {}
    for method in config.methods:
        made = made_by[method] = _made(method, config, folder, names, progress)
        if made.nothing is not None:
            continue
        progress.note(f"{method}: the held-out tasks with what it made")
        model, prompts = made.model or config.train.model, None if made.prompts is None else Path(made.prompts)
        drawn[method] = _measured(config, folder / f"{method}-held-out", model, prompts, progress)
    summaries = dict(zip(drawn, summarise_each(drawn.values(), counting), strict=True))
    base = summaries.pop(BASE)
    better = {method: difference(summary, base)[0] for method, summary in summaries.items()}
    sides = {
        method: Side(made=made, summary=summaries.get(method), better=better.get(method))
        for method, made in made_by.items()
    }
    found = Comparison(base=base, sides=sides, budget=config.budget, folder=folder)
    write_atomically(folder / RESULT_NAME, (json.dumps(found.to_json(), indent=2) + "\n").encode())
    return found


def _made(method: str, config: CompareConfig, folder: Path, names: list[str], progress: Progress) -> Made:
    """Let a way spend its budget, unless it has."""
    kept = folder / f"{method}.json"
    if kept.exists():
        return Made(**json.loads(kept.read_text(encoding="utf-8")))
    progress.note(f"{method}: at most {config.budget} rollouts on the training tasks")
    began = time.monotonic()
    try:
        made = learn(method, config, folder / method, names, progress)
    except NothingToLearnError as error:
        made = spent(folder / method, time.monotonic() - began, str(error))
        progress.note(f"{method}: {str(error).splitlines()[0]}")
    write_atomically(kept, (json.dumps(made.to_json(), indent=2) + "\n").encode())
    return made


def _measured(config: CompareConfig, place: Path, model: str, prompts: Path | None, progress: Progress) -> list[Sample]:
    """Run the held-out tasks, sampled as in training, with the same seeds for each side."""
    if files.is_evaluation(place):
        evaluate(resumed(place), progress, resume=place)
        return files.read_samples(place)
    train = config.train
    asked = EvalConfig(
        data=_val(config),
        target=train.target,
        command=train.command,
        reward=train.reward,
        judge=train.judge,
        model=model,
        prompts=prompts,
        agents=config.answered,
        samples=config.samples,
        counting=_counting(config),
        temperature=train.temperature,
        max_tokens=train.max_tokens,
        sampling=train.sampling,
        seed=train.seed,
        timeout_s=train.timeout_s,
        max_attempts=train.max_attempts,
        workers=train.workers,
        concurrency=train.concurrency,
        isolate=train.isolate,
        out=place,
        load=config.load,
        name_by=train.name_by,
        work=train.work,
    )
    evaluate(asked, progress)
    return files.read_samples(place)


def _counting(config: CompareConfig) -> Counting:
    train = config.train
    return Counting(failed=train.failed, timeouts=train.timeouts, agents=train.agents, declared=train.declared)


def _val(config: CompareConfig) -> Path:
    return config.train.val or config.train.data  # there is one: `CompareConfig.check`


def _asked(folder: Path, config: CompareConfig, marks: Mapping[str, str], resume: Path | None) -> None:
    """Keep what was asked; of a comparison that goes on make sure that the tasks are the same."""
    path = folder / ASKED_NAME
    if resume is None:
        text = json.dumps({**config.to_json(), "tasks": marks}, indent=2, default=str) + "\n"
        write_atomically(path, text.encode())
        return
    if json.loads(path.read_text(encoding="utf-8"))["tasks"] != marks:
        raise ConfigError(f"the tasks have changed since {folder} was started. Compare again, in another folder.")


def _begun(folder: Path) -> bool:
    return (folder / BASE / files.SUMMARY_NAME).exists()
