"""The options that rejection sampling takes from those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.work import Work


def rounds_options(config: ImproveConfig, own: Mapping[str, Any]) -> RoundsConfig:
    """Return the options of rounds: who runs, what is trained and how it samples as in a run, and its own.

    Args:
        config: of the search; ``--sft`` goes before what it would take from the run.
        own: of these rounds, which go before all.
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
    """Return the options of loading that rounds know only as the backend's."""
    return {
        name: value
        for name in ("max_model_len", "tool_format", "base_bits")
        if (value := getattr(train, name)) is not None
    }
