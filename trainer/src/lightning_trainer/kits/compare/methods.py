"""The ways: each learns from training tasks within its budget, and says what it made and what that took."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError, NothingToLearnError, UnknownAgentError
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.compare.config import CompareConfig
from lightning_trainer.models import NEWEST
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.usage import is_replayed, tokens_of
from lightning_trainer.run.data import Task, batch_at, load_tasks
from lightning_trainer.run.folders import read_config
from lightning_trainer.session.session import STORE_NAME, open_database
from lightning_trainer.work import Work

_AT_ONCE: Final = 64  # traces in memory
_STEP: Final = re.compile(r"(.*):t(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a way made of its budget.

    Attributes:
        rollouts: executions on training tasks; None where a way left nothing that says so.
        tokens: of all their model calls, prompts and answers; of prompts, those of the model that proposes, too; None
            likewise.
        seconds: by the clock.
        model: checkpoint with the weights; None where they stayed.
        prompts: file with prompts; None where they stayed.
        nothing: why there was nothing to learn; None where there was.
    """

    rollouts: int | None
    tokens: int | None
    seconds: float
    model: str | None = None
    prompts: str | None = None
    nothing: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as kept in the comparison's folder."""
        return asdict(self)


def learn(method: str, config: CompareConfig, folder: Path, names: Sequence[str], progress: Progress) -> Made:
    """Spend the budget in one way. What an earlier life of the comparison left in the folder is gone on with.

    Args:
        method: which way.
        config: of the comparison.
        folder: of this way.
        names: of the agents that are bettered, as they were seen.
        progress: callback for progress events.

    Raises:
        LightningError: see `train`, `rejection_sampling` and `optimise`.
    """
    ways: Mapping[str, Callable[..., Made]] = {"rl": _rl, "sft": _sft, "prompts": _prompts}
    return ways[method](config, folder, names, progress)


def spent(folder: Path, seconds: float, nothing: str) -> Made:
    """Return what a way came to that found nothing to learn."""
    rollouts, tokens = _counted(folder / STORE_NAME)
    return Made(rollouts=rollouts, tokens=tokens, seconds=seconds, nothing=nothing)


def _rl(config: CompareConfig, folder: Path, names: Sequence[str], progress: Progress) -> Made:  # noqa: ARG001
    from lightning_trainer.run.train import train

    if (folder / NEWEST).exists():
        asked = TrainConfig(**{**read_config(folder), "resume": folder})
    else:
        shutil.rmtree(folder, ignore_errors=True)
        steps = max(1, config.budget // config.step)
        own = {"val": None, "val_every": None, "epochs": None, "steps": steps, "out": folder, "resume": None}
        given = {**config.train.model_dump(), **own, "store": None, "checkpoint": "newest", "keep": 1}
        asked = TrainConfig(**{name: value for name, value in given.items() if value is not None})
    result = train(asked, progress)
    rollouts, tokens = _counted(folder / STORE_NAME)
    return Made(rollouts=rollouts, tokens=tokens, seconds=result.seconds, model=str(folder))


def _sft(config: CompareConfig, folder: Path, names: Sequence[str], progress: Progress) -> Made:  # noqa: ARG001
    from lightning_trainer.kits.sft.config import RoundsConfig
    from lightning_trainer.kits.sft.rounds.rejection import rejection_sampling, resumed
    from lightning_trainer.kits.sft.rounds.state import RESULT_NAME, STATE_NAME

    if (folder / RESULT_NAME).exists():
        return _of_rounds(folder, json.loads((folder / RESULT_NAME).read_text(encoding="utf-8")))
    if (folder / STATE_NAME).exists():
        asked, resume = resumed(folder), folder
    else:
        shutil.rmtree(folder, ignore_errors=True)
        tasks, resume = load_tasks(config.train.data, config.train.columns), None
        size = config.train.group_size
        of_a_round = max(1, config.budget // (config.rounds * size))
        rounds = config.rounds if of_a_round <= len(tasks) else max(1, config.budget // (len(tasks) * size))
        file = _some(tasks, of_a_round, config.train.seed, folder.with_name(f"{folder.name}-tasks.jsonl"))
        asked = RoundsConfig(**{**_shared(config.train), "tasks": file, "rounds": rounds, "out": folder, **config.sft})
    return _of_rounds(folder, rejection_sampling(asked, progress, resume=resume).to_json())


def _of_rounds(folder: Path, result: Mapping[str, Any]) -> Made:
    rollouts, tokens = _counted(folder / STORE_NAME)
    return Made(rollouts=rollouts, tokens=tokens, seconds=result["seconds"], model=result["checkpoint"])


def _shared(train: TrainConfig) -> dict[str, Any]:
    """Return the options that rounds take from a run: who runs, what is trained, how it samples."""
    same = (
        "target", "command", "reward", "judge", "agents", "policies", "model", "backend_options", "chat_template",
        "system_messages", "dtype", "device", "seed", "workers", "concurrency", "isolate", "timeout_s", "max_attempts",
        "temperature", "name_by", "failed", "timeouts", *(each.name for each in fields(Work)),
    )  # fmt: skip
    lora = ("lora_rank", "lora_alpha") if train.lora_rank else ()
    found = {name: getattr(train, name) for name in (*same, *lora)}
    found |= {"samples": train.group_size, "answer_tokens": train.max_tokens}
    found["backend_options"] = {**_loaded(train), **train.backend_options}
    return {name: value for name, value in found.items() if value is not None}


def _loaded(train: TrainConfig) -> dict[str, Any]:
    """Return the options of loading that rounds know as the backend's alone."""
    names = ("max_model_len", "tool_format")
    return {name: value for name in names if (value := getattr(train, name)) is not None}


def _prompts(config: CompareConfig, folder: Path, names: Sequence[str], progress: Progress) -> Made:
    from lightning_trainer.kits.prompts.optimise import PromptsConfig, optimise
    from lightning_trainer.session.answers import read_subject

    began, train = time.monotonic(), config.train
    folder.mkdir(exist_ok=True)
    out = folder / "prompts.json"
    search = out.with_name(f"{out.name}.search")
    if not (search / "prompts.json").exists():
        shutil.rmtree(search, ignore_errors=True)
        out.unlink(missing_ok=True)
    tasks = load_tasks(train.data, train.columns)
    if config.reflect is None:
        raise ConfigError("prompts needs a model that proposes them: --reflect [MODEL=]URL.")
    try:
        found = optimise(
            PromptsConfig(
                data=_some(tasks, max(4, config.budget // 6), train.seed, folder / "tasks.jsonl"),
                agents=tuple(names),
                leave_silent=True,
                reflect=config.reflect,
                budget=config.budget,
                out=out,
                target=train.target,
                command=train.command,
                reward=train.reward,
                subject=read_subject(train.model),
                answered=config.answered or ("*",),
                temperature=train.temperature,
                max_tokens=train.max_tokens,
                sampling=train.sampling,
                load=config.load,
                name_by=train.name_by,
                work=train.work,
                seed=train.seed,
                concurrency=train.concurrency,
                isolate=train.isolate,
                timeout_s=train.timeout_s,
                max_attempts=train.max_attempts,
                workers=train.workers,
            ),
            progress,
            resume=search.exists(),
        )
    except UnknownAgentError as error:  # it speaks in held-out tasks: `compare` took its name from there
        raise NothingToLearnError(str(error)) from error
    nothing = None if found.diff else "no proposal was better than the agents' own prompts"
    seconds = time.monotonic() - began
    return Made(rollouts=found.rollouts, tokens=found.tokens, seconds=seconds, prompts=str(out), nothing=nothing)


def _some(tasks: Sequence[Task], count: int, seed: int, file: Path) -> Path:
    """Write so many of the tasks, drawn as a run draws its first batch, and return the file."""
    places = batch_at(0, len(tasks), min(count, len(tasks)), seed)
    lines = (json.dumps(tasks[place], ensure_ascii=False) + "\n" for place in places)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
    return file


def learned_from(rollout_ids: Sequence[str]) -> list[str]:
    """Return the rollouts that are left when a life that goes on draws again what an earlier one drew.

    Args:
        rollout_ids: in the order in which they were queued: the life's name, ``:t``, the step or round, and more.
    """
    kept: list[tuple[str, int | None]] = []
    life = ""
    for rollout_id in rollout_ids:
        found = _STEP.match(rollout_id)
        if found is None:
            kept.append((rollout_id, None))
            continue
        step = int(found[2])
        if found[1] != life:
            life = found[1]
            kept = [(name, its) for name, its in kept if its is None or its < step]
        kept.append((rollout_id, step))
    return [name for name, _ in kept]


def _counted(store: Path) -> tuple[int, int] | tuple[None, None]:
    """Count the rollouts of a way, and the tokens of their model calls; None where there is no store.

    What a fork was given from its record was asked of nobody: it counts where it was drawn, and not again. Nor does
    what a life that was cut drew after its last checkpoint or round: of that nothing was learned.
    """
    if not store.exists():
        return None, None
    with open_database(str(store)) as kept:
        ids = learned_from([rollout.rollout_id for rollout in kept.rollouts()])
        tokens = 0
        for first in range(0, len(ids), _AT_ONCE):
            for trace in traces_of(kept, rollout_ids=ids[first : first + _AT_ONCE]):
                tokens += sum(sum(tokens_of(node)) for node in trace.chats if not is_replayed(node))
    return len(ids), tokens
