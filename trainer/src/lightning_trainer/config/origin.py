"""The run that a model comes from, and what only that run records about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import CONFIG_NAME, read_kept
from lightning_trainer.models import BEST, NEWEST, Model, look
from lightning_trainer.models.verl_folders import verl_checkpoint
from lightning_trainer.options.record import OptionRecord

_OptionsT = TypeVar("_OptionsT", bound=OptionRecord)


def run_of(model: Model) -> Path | None:
    """Return the run that weights come from; None: none.

    `train` stores them by step, on verl in a folder within that, `sft` one level below its folder.
    """
    if model.folder is None:
        return None
    folder = model.folder.resolve()
    places = [folder.parent.parent] if model.kind == "checkpoint" else []
    if folder.name in {BEST, NEWEST}:
        places = [folder.parent]
    if (checkpoint := verl_checkpoint(folder)) is not None:
        places = [checkpoint.parent.parent]
    return next((place for place in places if (place / CONFIG_NAME).is_file()), None)


def options_of(run: Path | None) -> dict[str, Any]:
    """Read the options of a run; {} if there is none.

    Raises:
        ConfigError: they cannot be read.
    """
    return {} if run is None else read_kept(run, "Give a run's folder, or a model.")


def chosen_format(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option for the tool-call format of a run's model, which no checkpoint contains; {} if none was set."""
    name = options.get("tool_format") or (options.get("backend_options") or {}).get("tool_format")
    return {} if name is None else {"tool_format": name}


def with_format(config: _OptionsT) -> _OptionsT:
    """Return a new run's options with the tool-call format of the run that its model comes from.

    Args:
        config: options of training or fine-tuning, with a `model` and a `tool_format`.

    Raises:
        ConfigError: the options of that run cannot be read.
    """
    options = dict(config)
    if options.get("resume") is not None or chosen_format(options):
        return config
    try:
        found = look(options["model"])
    except ConfigError:  # the backend reports what is wrong with it, or knows models of another kind
        return config
    return config.model_copy(update=chosen_format(options_of(run_of(found))))
