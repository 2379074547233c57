"""Disk and memory that the embedded backend needs, computed before anything is loaded. No torch here.

Weights are counted from the sizes of the model's safetensors files. A checkpoint contains

    weights alone     W n
    with what resuming needs   W n + (4 + 8) t

bytes, for n weights of W bytes each (2 in bfloat16) of which t are trained: a float32 master and two moments of AdamW.
With LoRA a checkpoint contains only the adapters, not the n weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer import models
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.bases import read_base
from lightning_trainer.models.shape import Shape, lora_parameters, read_shape
from lightning_trainer.policies import parse
from lightning_trainer.run.folders import RUNS

MASTER: Final = 4  # bytes of a trained weight's float32 master
MOMENTS: Final = 8  # bytes of its two moments
_TOKENIZER: Final = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of weights.

    Attributes:
        all: of the model.
        trained: of these, or of adapters.
        width: bytes of each during generation.
        shape: of the model; None if it is of an unknown kind.
        rank: of the adapters that are trained; 0: all weights are.
        bits: of the frozen weights under the adapters; None: `width`.
    """

    all: int
    trained: int
    width: int
    shape: Shape | None
    rank: int
    bits: int | None

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint from which a run can resume."""
        return self.light + (MASTER + MOMENTS) * self.trained

    @property
    def light(self) -> int:
        """Bytes of a checkpoint with only the weights."""
        return self.width * self.trained + _TOKENIZER


def weights_of(config: TrainConfig) -> Weights | None:
    """Return the weights of a run's model; None if its files are not here yet.

    Raises:
        ConfigError: there is no such model.
    """
    place = models.look(config.model).folder
    base = None if place is None else read_base(place)
    if base is None or not (base.folder / "config.json").is_file():
        return None
    folder, rank = base.folder, config.lora_rank or base.rank
    others = ("trainer.", "consolidated")  # the optimiser's state; the same weights in another format
    files = [path for path in folder.glob("*.safetensors") if not path.name.startswith(others)]
    stored = sum(path.stat().st_size for path in files)
    own = _width_of(folder)
    dtype = (base.dtype if config.dtype == "auto" else None) or config.dtype
    width = {"float32": 4, "bfloat16": 2}.get(dtype, 4 if own == 4 else 2)
    shape = read_shape(str(folder))
    number = stored // own or (shape.parameters if shape else 0)  # a folder may have config.json alone, for a plan
    trained = number
    if rank:
        adapters = len(parse(config.policies).adapters) if config.policies else 1
        trained = adapters * (lora_parameters(folder, rank) or number // 50)
    return Weights(all=number, trained=trained, width=width, shape=shape, rank=rank, bits=config.base_bits or base.bits)


def check_disk(config: TrainConfig, steps: int | None) -> None:
    """Check that there is room for a run's checkpoints.

    Args:
        config: of the run.
        steps: of the run; None if not yet known.

    Raises:
        ConfigError: there is not; the message says how much is needed, and how to need less.
    """
    weights = weights_of(config)
    if weights is None:
        return
    place = next(path for path in _up(config.out or config.resume or RUNS) if path.exists())
    free, wanted = shutil.disk_usage(place).free, room(config, weights, steps)
    if free < wanted:
        smaller = "" if config.checkpoint == "weights" else f", with --checkpoint weights {gb(weights.light)} each"
        raise ConfigError(
            f"checkpoints of this run take {gb(wanted)}, and {gb(free)} are free in {place.resolve()}: a whole one is"
            f" {gb(weights.checkpoint)}{smaller}. Make room, choose another --out, or keep fewer (--keep 1)."
        )


def room(config: TrainConfig, weights: Weights, steps: int | None) -> int:
    """Return the most bytes that a run's checkpoints take at once: those kept, and one that is being written."""
    saved = config.keep if steps is None else 1 + (steps - 1) // config.save_every
    older = min(max(saved - 1, int(steps != 1)), config.keep)  # long steps are saved before their number is due
    if config.checkpoint == "weights":
        return (older + 1) * weights.light
    if config.checkpoint == "full":
        return (older + 1) * weights.checkpoint
    return weights.checkpoint * min(older + 1, 2) + weights.light * max(older - 1, 0)


def gb(number: float) -> str:
    """Return a size in a readable form."""
    return f"{number / 1e9:.2f} GB" if number >= 5e7 else f"{number / 1e6:.1f} MB"


def _up(folder: Path) -> list[Path]:
    return [folder.absolute(), *folder.absolute().parents]


def _width_of(folder: Path) -> int:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} can't be read: {error}.") from None
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    return 4 if named == "float32" else 2
