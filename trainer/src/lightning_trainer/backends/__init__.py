"""Backends: what generates with a policy and updates it. Chosen by name: ``torch`` (embedded) or a plugin's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_trainer.engine import Engine
    from lightning_trainer.rows import Row


class Backend(Protocol):
    """A policy, or several: engines, weights, optimisers."""

    @property
    def engine(self) -> Engine:
        """Generates with the newest weights."""
        ...

    @property
    def engines(self) -> Sequence[Engine]:
        """One for each policy that is served, by the engine's `model`; `engine` is the first."""
        ...

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step on these rows and publish the weights to the engine.

        Returns:
            Metrics by name: loss, grad_norm, clip_fraction, kl, entropy, logprob_gap (mean absolute difference between
            the engine's recorded log-probabilities and the trainer's), tokens, seconds.
        """
        ...

    def penalties(self, rows: Sequence[Row]) -> Sequence[NDArray[Any]]:
        """Give what the divergence takes off the reward, for each row (K,) of its trained tokens (`kl_in = "reward"`).

        Returns:
            The weight of the divergence times its estimate, from the log-probabilities with which tokens were sampled.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights (a model folder that `serve` and transformers can load), optimiser and random state."""
        ...

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote, bit for bit.

        Raises:
            ConfigError: the folder is a checkpoint of another model or kind.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free memory."""
        ...


def open_backend(name: str, model: str, options: Mapping[str, Any]) -> Backend:
    """Open a backend by name: ``torch``, or one that a plugin registers as a callable (model, **options) -> Backend.

    Args:
        name: of the backend.
        model: what `--model` names; each backend finds it in its own way.
        options: by name; those that the backend does not know are errors.

    Raises:
        ConfigError: no backend has that name, its packages are missing, or it refuses the model or an option.
    """
    from lightning_spans.plugins import registry

    known: dict[str, Callable[..., Backend]] = {"torch": _torch, **registry("lightning_register_backends")}
    if name not in known:
        raise ConfigError(f"unknown backend {name!r}. Use one of: {', '.join(sorted(known))}.")
    return known[name](model, **options)


def need_torch() -> None:
    """Make sure that what the embedded backend needs is installed.

    Raises:
        ConfigError: it is not; the message says how to install it.
    """
    missing = [package for package in ("torch", "transformers", "peft", "safetensors") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f'this needs {", ".join(missing)}, not installed here. Run: pip install "lightning-trainer[torch]"'
        )


def _torch(model: str, **options: Any) -> Backend:
    need_torch()
    from lightning_trainer.backends.torch import TorchBackend
    from lightning_trainer.models import resolve_model

    return TorchBackend(resolve_model(model), **options)
