"""The options of rejection sampling, derived from those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.work import Work


def rounds_options(config: ImproveConfig, own: Mapping[str, Any]) -> RoundsConfig:
    """Return the options of rounds: those of the run for program, training and sampling, and the rounds' own.

    Args:
        config: options of the search; ``--sft`` takes precedence over options of the run.
        own: options of these rounds, which take precedence over all others.
    """
    train = config.train
    same = (
        "target", "command", "reward", "backend_options", "chat_template", "system_messages", "dtype", "device",
        "workers", "concurrency", "isolate", "timeout_s", "max_attempts", "temperature", "name_by", "failed",
        "timeouts", "lora_rank", "lora_alpha", *(each.name for each in fields(Work)),
    )  # fmt: skip
    values = {name: getattr(train, name) for name in same}
    values |= {"samples": train.group_size, "answer_tokens": train.max_tokens}
    values["backend_options"] = {**_loading_options(train), **train.backend_options}
    return RoundsConfig(**{**{n: v for n, v in values.items() if v is not None}, **config.sft, **own})


def _loading_options(train: TrainConfig) -> dict[str, Any]:
    """Return the loading options that rounds accept only as backend options."""
    return {
        name: value
        for name in ("max_model_len", "tool_format", "base_bits")
        if (value := getattr(train, name)) is not None
    }
