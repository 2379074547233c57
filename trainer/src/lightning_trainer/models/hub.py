"""Models of the hub: fetching, and finding those that were fetched before."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError

_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
# The same weights once more, in another format; and what is in folders, except `additional_chat_templates/*.jinja`.
_OTHERS: Final = ("consolidated*", "*/*.json", "*/*.safetensors", "*/*.txt")
NEEDED: Final = 'Install what models need: pip install "lightning-trainer[torch]"'


def fetch(name: str, revision: str | None) -> Path:
    """Return the folder of a hub model; fetch the missing files.

    Raises:
        ConfigError: it cannot be fetched; the message says why.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ConfigError(f"{error}. {NEEDED}") from error
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_OTHERS))
        )
    except LocalEntryNotFoundError:
        asked = f"{name}@{revision}" if revision else name
        raise ConfigError(f"{asked} is not a folder, and the model hub can't be reached. Give a folder.") from None
    except GatedRepoError:
        raise ConfigError(f"{name} is gated: ask for access on its page, then run: hf auth login") from None
    except RevisionNotFoundError:
        raise ConfigError(f"{name} has no revision {revision}. Give a branch, tag or commit of it.") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"the model hub has no {name}, or you have no access. Check the name, or run: hf auth login"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{name} can't be fetched from the model hub: {reason}") from error


def cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model that was fetched before; None if it was not."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
