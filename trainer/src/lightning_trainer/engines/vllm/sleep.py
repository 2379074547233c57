"""vLLM's sleep mode: the server gives its GPU memory to the learner for an update, and takes it back.

Level 1 is used: vLLM copies its weights and adapters to the machine's memory and discards its keys and values. Level 2
would drop both. It restores the model's own buffers only, not those of adapters, which its tables still list as loaded
(vLLM 0.27.1, `v1/worker/gpu_worker.py`); and all weights would have to be read twice in each step.
"""

from __future__ import annotations

from typing import Final

import httpx

from lightning_trainer.engines.contract import EngineError
from lightning_trainer.engines.vllm.process import VllmProcess

_SLEEP_S: Final = 600.0  # copies of all weights, on a machine that may be busy


def fall_asleep(process: VllmProcess) -> None:
    """Put a server to sleep that is not restarted if it crashes: see `VllmProcess.hold`.

    Raises:
        EngineError: it does not fall asleep.
    """
    _post(process, "sleep?level=1")


def wake_up(process: VllmProcess) -> None:
    """Wake a server.

    Raises:
        EngineError: it does not wake up.
    """
    _post(process, "wake_up")


def _post(process: VllmProcess, path: str) -> None:
    """Send a request, which fails only if the server goes on: one whose engine died answers once more, then ends."""
    headers, url = {"authorization": f"Bearer {process.key}"}, process.url
    try:
        httpx.post(f"{url}/../{path}", headers=headers, timeout=_SLEEP_S).raise_for_status()
    except httpx.HTTPError as error:
        said = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else f"{error}"
        if not process.ends(url):
            raise EngineError(f"vLLM does not answer to /{path}: {type(error).__name__}: {said}") from None
