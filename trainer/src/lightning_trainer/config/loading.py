"""How a run loads its model, for commands that only sample from it."""

from __future__ import annotations

from typing import Any, Final

from lightning_trainer.config.origin import chosen_format, with_format
from lightning_trainer.config.train import TrainConfig

_LOADING: Final = ("chat_template", "device", "dtype", "max_model_len", "system_messages")
_GENERATING: Final = ("slots", "generate_threads", "threads")  # among the backend's own options


def load_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options with which the torch backend loads a model as this run does, to sample from it."""
    options = {name: value for name, value in config.backend_options.items() if name in _GENERATING}
    options |= {name: value for name in _LOADING if (value := getattr(config, name)) not in (None, "auto")}
    return options | chosen_format(dict(with_format(config)))
