"""The folder of an evaluation: its options, its samples, and its summary. It is read again to resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.report.metrics import write_atomically

EVALS: Final = Path("evals")  # default parent of evaluation folders
ASKED_NAME: Final = "eval.json"
SAMPLES_NAME: Final = "samples.jsonl"
SUMMARY_NAME: Final = "summary.json"
PROGRAM: Final = "program"  # in the summary: the fingerprint of the program


def is_evaluation(folder: Path) -> bool:
    """Whether a folder contains an evaluation."""
    return (folder / ASKED_NAME).is_file()


def has_samples(folder: Path) -> bool:
    """Whether a sample of an evaluation has finished."""
    return (folder / SAMPLES_NAME).is_file()


def write_options(folder: Path, asked: Mapping[str, Any]) -> None:
    """Save the options of an evaluation."""
    write_atomically(folder / ASKED_NAME, (json.dumps(without_passwords(asked), indent=2, default=str) + "\n").encode())


def read_options(folder: Path) -> dict[str, Any]:
    """Read the options of an evaluation.

    Raises:
        ConfigError: there is no evaluation, or its file cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads((folder / ASKED_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no evaluation: there is no {ASKED_NAME} in it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / ASKED_NAME} can't be read: {error}.") from None
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise ConfigError(
            f"{folder / ASKED_NAME} is not what an evaluation writes. Evaluate again into another folder."
        )
    return values


def write_samples(folder: Path, samples: Sequence[Sample]) -> None:
    """Write one line per sample, in the order of tasks."""
    lines = [json.dumps(s.to_json(), ensure_ascii=False) for s in sorted(samples, key=lambda s: (s.task, s.sample))]
    write_atomically(folder / SAMPLES_NAME, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def read_samples(folder: Path) -> list[Sample]:
    """Read the samples of an evaluation.

    Raises:
        ConfigError: the file is missing, or a line cannot be read.
    """
    path = folder / SAMPLES_NAME
    try:
        return [Sample.from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {SAMPLES_NAME}: nothing was measured yet.") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Evaluate again into another folder.") from None


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Save the summary of an evaluation."""
    write_atomically(folder / SUMMARY_NAME, (json.dumps(summary, indent=2) + "\n").encode())


def read_program(folder: Path) -> dict[str, Any]:
    """Read the fingerprint of the program that was evaluated.

    Raises:
        ConfigError: the evaluation has not finished, or an earlier version made it.
    """
    path = folder / SUMMARY_NAME
    try:
        program = json.loads(path.read_text(encoding="utf-8"))[PROGRAM]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} holds no fingerprint of the program ({type(error).__name__}). Give the folder of an evaluation"
            " that has ended; one of an earlier version must be repeated."
        ) from None
    return dict(program)
