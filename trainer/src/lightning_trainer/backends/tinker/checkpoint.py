"""Checkpoints: the adapters in peft's format, in local folders; and where the server keeps the rest."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.policies import ADAPTERS_NAME

STATE: Final = "tinker.json"
_FORMAT: Final = 1
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MODULE: Final = re.compile(r"(\w+)\.lora_[AB](?:\.\w+)?\.weight$")
_MOST: Final = 8 << 30  # bytes of an adapter


def unpack(archive: bytes, folder: Path, base: str) -> None:
    """Write an adapter's archive as a folder that peft loads, and fill in what a server leaves out.

    Raises:
        TinkerError: the archive contains no adapter.
        OSError: it cannot be written.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                name = Path(member.name).name
                file = tar.extractfile(member) if member.isfile() and name in (_CONFIG, _WEIGHTS) else None
                if file is not None and member.size <= _MOST:
                    found[name] = file.read()
        config, tensors = json.loads(found[_CONFIG]), _names(found[_WEIGHTS])
    except (tarfile.TarError, EOFError, KeyError, ValueError, OSError) as error:
        raise TinkerError(
            f"the server sent an archive without an adapter ({type(error).__name__}: {error})."
        ) from error
    modules = sorted({match[1] for name in tensors if (match := _MODULE.search(name))})
    if not modules or not isinstance(config, dict):
        raise TinkerError("the server sent an archive whose adapter has no LoRA weights.")
    # SkyRL 0.4 writes no targets. peft would use the model family's defaults and leave out half of the weights.
    config |= {
        "target_modules": modules, "task_type": "CAUSAL_LM", "peft_type": "LORA", "base_model_name_or_path": base,
        "inference_mode": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _WEIGHTS).write_bytes(found[_WEIGHTS])
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _names(tensors: bytes) -> list[str]:
    """Return the names in a safetensors file."""
    size = int.from_bytes(tensors[:8], "little")
    header = json.loads(tensors[8 : 8 + size])
    return [str(name) for name in header if name != "__metadata__"]


def write_index(folder: Path, base: str, adapters: Sequence[str]) -> None:
    """Write which adapters a checkpoint of several contains, as the torch backend does."""
    index = {"base": base, "adapters": list(adapters)}
    (folder / ADAPTERS_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_state(folder: Path, values: Mapping[str, Any]) -> None:
    """Write what a run needs to continue."""
    (folder / STATE).write_text(json.dumps({"format": _FORMAT, **values}, indent=2) + "\n", encoding="utf-8")


def read_state(folder: Path, url: str, base: str, policies: Sequence[str]) -> dict[str, Any]:
    """Read what `write_state` wrote.

    Raises:
        ConfigError: it is missing or damaged, or belongs to another server, model or set of adapters.
    """
    path = folder / STATE
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        own = {name: dict(values["policies"][name]) for name in policies}
        if values["format"] != _FORMAT or set(values["policies"]) != set(policies):
            raise ValueError(f"it is of {', '.join(values['policies'])}")
        for each in own.values():
            each["path"], each["version"], each["steps"]
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a checkpoint of backend = tinker: it has no {STATE}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} can't be read ({type(error).__name__}: {error}). Give another checkpoint.") from None
    if (values.get("url"), values.get("base")) != (url, base):
        raise ConfigError(
            f"{folder} belongs to the server {values.get('url')} and its model {values.get('base')}, and the"
            f" optimiser's state is there, not at {url} with {base}. Name these, or start a new run."
        )
    return values
