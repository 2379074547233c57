"""The model under a checkpoint's adapters: its folder, and the number format of its weights in training.

Two files hold the format: `base.json` next to adapters, for the model that they need, and `rounded.json` in the folder
of a model whose weights are already rounded to so many bits, in an ordinary number format.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models import look
from lightning_trainer.policies import ADAPTERS_NAME

NEEDED: Final = "base.json"
ROUNDED: Final = "rounded.json"
_PEFT: Final = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """The number format of a frozen model's weights.

    Attributes:
        bits: to which the weights of its linear layers were rounded; None: they were not.
        dtype: of the other weights, and of all products: float32 or bfloat16; None: not recorded, by an older version.
    """

    bits: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model under adapters.

    Attributes:
        folder: its folder; the checkpoint's own if it contains a whole model.
        rank: of the adapters; 0 without adapters.
        bits: to which the weights of its linear layers were rounded in training; None: they were not.
        dtype: in which the adapters were trained; None: not recorded.
        targets: names of the layers that have adapters; empty if there are none, or if a pattern names them.
    """

    folder: Path
    rank: int = 0
    bits: int | None = None
    dtype: str | None = None
    targets: tuple[str, ...] = ()


def read_base(folder: Path) -> AdapterBase:
    """Return the model under a folder's adapters, or the folder itself if it has none.

    Raises:
        ConfigError: a file that describes the adapters cannot be read.
    """
    index, first = _object(folder / ADAPTERS_NAME), folder
    if index.get("adapters"):
        first = folder / str(index["adapters"][0])
    peft = _object(first / _PEFT)
    base = Path(str(index.get("base") or peft.get("base_model_name_or_path") or folder))
    number = read_format(folder / NEEDED) or NumberFormat()
    whole = base if base.is_dir() else folder
    named = peft.get("target_modules")
    targets = tuple(map(str, named)) if isinstance(named, list) else ()
    return AdapterBase(whole, int(peft.get("r") or 0), number.bits, number.dtype, targets)


def adapter_rank(model: str) -> int:
    """Return the rank of the adapters that a model already has, without fetching it; 0 without adapters.

    A model that is not found has none here: the backend reports what is wrong with it, or knows models of another kind.

    Raises:
        ConfigError: a file that describes the adapters cannot be read.
    """
    try:
        folder = look(model).folder
    except ConfigError:
        return 0
    return 0 if folder is None else read_base(folder).rank


def read_format(path: Path) -> NumberFormat | None:
    """Read one of the two files; None if it does not exist.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        bits, dtype = values["bits"], values.get("dtype")
        return NumberFormat(None if bits is None else int(bits), None if dtype is None else str(dtype))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Give another checkpoint.") from None


def bits_in(path: Path) -> int | None:
    """Read the number of bits in one of the two files; None if it does not exist, or if nothing was rounded.

    Raises:
        ConfigError: it cannot be read.
    """
    return (read_format(path) or NumberFormat()).bits


def write_format(path: Path, number: NumberFormat) -> None:
    """Write one of the two files."""
    path.write_text(json.dumps(asdict(number)) + "\n", encoding="utf-8")


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file does not exist.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Give another checkpoint.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object. Give another checkpoint.")
    return values
