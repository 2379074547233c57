"""The folder of an evaluation: what was asked, a line a sample, and what it came to. Found again when it goes on."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.run.folders import PRIVATE

EVALS: Final = Path("evals")  # where evaluations without a folder of their own go
ASKED_NAME: Final = "eval.json"
SAMPLES_NAME: Final = "samples.jsonl"
SUMMARY_NAME: Final = "summary.json"
STORE_NAME: Final = "lightning.db"


def make(out: Path | None) -> Path:
    """Make an evaluation's folder, the one asked for or one named after the day.

    Raises:
        ConfigError: it can't be made, or holds anything.
    """
    try:
        if out is None:
            return _dated()
        out.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        full = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"the folder {out or EVALS} can't be made: {error.strerror}. Choose --out.") from None
    if full:
        raise ConfigError(f"{out} is not empty. Choose another --out, or go on with --resume {out}.")
    return out


def _dated() -> Path:
    day = dt.datetime.now().astimezone().date().isoformat()
    EVALS.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = EVALS / (day if number == 1 else f"{day}-{number}")
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            continue
        break
    return folder


def is_evaluation(folder: Path) -> bool:
    """Whether an evaluation lies there."""
    return (folder / ASKED_NAME).is_file()


def write_asked(folder: Path, asked: Mapping[str, Any]) -> None:
    """Keep what was asked."""
    write_atomically(folder / ASKED_NAME, (json.dumps(without_passwords(asked), indent=2, default=str) + "\n").encode())


def read_asked(folder: Path) -> dict[str, Any]:
    """Read what was asked.

    Raises:
        ConfigError: there is no evaluation, or its file can't be read.
    """
    try:
        values: dict[str, Any] = json.loads((folder / ASKED_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no evaluation: there is no {ASKED_NAME} in it.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ASKED_NAME} can't be read: {error}.") from None
    return values


def write_samples(folder: Path, samples: Sequence[Sample]) -> None:
    """Write a line a sample, in the order of tasks."""
    lines = [json.dumps(s.to_json(), ensure_ascii=False) for s in sorted(samples, key=lambda s: (s.task, s.sample))]
    write_atomically(folder / SAMPLES_NAME, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def read_samples(folder: Path) -> list[Sample]:
    """Read the samples of an evaluation.

    Raises:
        ConfigError: the file is not there, or a line can't be read.
    """
    path = folder / SAMPLES_NAME
    try:
        return [Sample.from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {SAMPLES_NAME}: nothing of it was measured yet.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Evaluate again into another folder.") from None


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Keep what it came to."""
    write_atomically(folder / SUMMARY_NAME, (json.dumps(summary, indent=2) + "\n").encode())
