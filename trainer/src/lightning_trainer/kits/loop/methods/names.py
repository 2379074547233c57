"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.loop.methods.adapter import AdapterMethod
from lightning_trainer.kits.loop.methods.method import LearningMethod
from lightning_trainer.kits.loop.methods.prompt import PromptMethod
from lightning_trainer.kits.loop.methods.search import SearchMethod
from lightning_trainer.kits.loop.methods.served import ServedMethod

METHODS: Final[Mapping[str, LearningMethod]] = {
    "train": AdapterMethod(),
    "improve": SearchMethod(),
    "prompts": PromptMethod(),
    "model": ServedMethod(),
}


def find_method(name: object) -> LearningMethod:
    """Return a method.

    Raises:
        ConfigError: there is none of this name.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"train.method = {name!r}: give one of {', '.join(METHODS)}.")
    return METHODS[name]
