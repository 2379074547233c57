"""LoRA adapters of a checkpoint on vLLM: loaded into the servers that answer for the base, each under its own name.

vLLM reads them from the path that it is told, so the checkpoint lies where its servers see it, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.policies import ADAPTERS_NAME

_PEFT: Final = "adapter_config.json"
_LOADING_S: Final = 600.0
_START: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK"


def adapters_in(checkpoint: Path) -> dict[str, Path]:
    """Return the folder of each adapter of a checkpoint, or of a run that has one, by the adapter's name.

    Raises:
        ConfigError: it holds no adapters, or one of them is missing.
    """
    folder = checkpoint / "checkpoint" if (checkpoint / "checkpoint").exists() else checkpoint
    path = folder / ADAPTERS_NAME
    try:
        names = [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["adapters"]]
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {ADAPTERS_NAME}, so it holds no adapters. Give the checkpoint of a run with --policy."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Give another checkpoint.") from None
    found = {name: (folder / name).resolve() for name in names}
    for name, own in found.items():
        if not (own / _PEFT).is_file():
            raise ConfigError(f"{folder} names the adapter {name}, but {own / _PEFT} is not there.")
    return found


def load_adapters(checkpoint: Path, upstreams: Sequence[Upstream]) -> list[Upstream]:
    """Load a checkpoint's adapters into the servers of its base, in the place of earlier ones of the same names.

    Args:
        checkpoint: folder with the adapters.
        upstreams: the one whose servers answer for the base.

    Returns:
        An upstream for each adapter: the same servers under its name.

    Raises:
        ConfigError: there is not one upstream, a name is taken, or a server does not load an adapter.
    """
    found = adapters_in(checkpoint)
    if len(upstreams) != 1:
        raise ConfigError(
            f"--adapters needs one --upstream, that of their base: {len(upstreams)} are given. Give BASE=URL."
        )
    (base,) = upstreams
    if base.model in found:
        raise ConfigError(f"the upstream {base.model} has the name of an adapter. Serve the base under another.")
    headers = {"authorization": f"Bearer {base.key}"} if base.key else {}
    with httpx.Client(headers=headers, timeout=_LOADING_S) as client:
        for url in (base.url, *base.replicas):
            for name, folder in found.items():
                _load(client, url, name, folder)
    return [replace(base, model=name) for name in found]


def _load(client: httpx.Client, url: str, name: str, folder: Path) -> None:
    asked = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
    try:
        reply = client.post(f"{url}/load_lora_adapter", json=asked)
    except httpx.TransportError as error:
        raise ConfigError(f"{url} did not load the adapter {name}: {error or type(error).__name__}.") from None
    if reply.status_code == 200:
        return
    words = _error_of(reply)
    if words is None and reply.status_code in (404, 405):
        raise ConfigError(f"{url} does not load adapters while it runs. Start vLLM so: {_START}")
    said = words or f"status {reply.status_code}, {reply.text[:500]}"
    raise ConfigError(f"{url} did not load the adapter {name} from {folder}: {said}")


def _error_of(reply: httpx.Response) -> str | None:
    """Return vLLM's own words; None of a page that it does not have."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
