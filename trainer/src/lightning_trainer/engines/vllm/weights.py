"""All weights of a policy on a vLLM server: read from a folder into a running server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from lightning_spans.errors import ConfigError
from lightning_trainer.engines.contract import EngineError, WriteWeights

_LOADING_S: Final = 600.0
_GUARD: Final = "lightning_vllm_guard"


def replace_weights(urls: Sequence[str], key: str | None, folder: Path) -> None:
    """Load weights into servers, and discard the keys and values that earlier weights computed.

    Args:
        urls: of the servers, which run in vLLM's development mode.
        key: of the servers.
        folder: a folder that they can read.

    Raises:
        ConfigError: a server does not take them.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    with httpx.Client(headers=headers, timeout=_LOADING_S) as client:
        for url in urls:
            for path, body in (("collective_rpc", reload), ("reset_prefix_cache", None)):
                _post(client, f"{url}/../{path}", body)


def _post(client: httpx.Client, url: str, body: Any) -> None:
    try:
        client.post(url, json=body).raise_for_status()
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"vLLM does not replace its weights: {error}: {error.response.text[:300]}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"vLLM does not replace its weights: {type(error).__name__}: {error}") from None


def development_mode(folder: Path, path: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return variables and options of a server whose weights can be replaced, with its key required on every path.

    Args:
        folder: gets the module that requires the key.
        path: PYTHONPATH so far.
    """
    shutil.copy(Path(__file__).with_name("guard.py"), folder / f"{_GUARD}.py")
    env = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"{folder}:{path}" if path else str(folder)}
    return env, {"middleware": f"{_GUARD}.KeyGuard"}


def write_weights(write: WriteWeights, name: str, folder: Path) -> None:
    """Write the newest weights of a policy into a folder.

    Raises:
        EngineError: the folder does not take them.
    """
    from safetensors import SafetensorError

    try:
        write(name, folder)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"the weights of {name} could not be written to {folder}: {error}. Free space there, or name another"
            ' folder: engine_options = {folder = "/path"}.'
        ) from None
