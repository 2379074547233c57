"""Middleware of vLLM's server: lists the adapter that verl sends, so that HTTP requests can name it.

verl gives the adapter to vLLM's workers as tensors, always under the same number, and clears the prefix cache
afterwards. vLLM's server itself lists only adapters that it loaded from a folder, and answers 404 for others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm.lora.request import LoRARequest

Scope = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]


class AdapterListing:
    """ASGI middleware: adds the adapter to the server's list before each request."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._adapter = LoRARequest(lora_name=VLLM_LORA_NAME, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            scope["app"].state.openai_serving_models.lora_requests.setdefault(VLLM_LORA_NAME, self._adapter)
        await self._app(scope, receive, send)
