"""Every way to ask for a model's answer, so that an attack is made on each."""

from __future__ import annotations

from typing import Any

SURFACES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"model": "policy", "messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"model": "policy", "prompt": text},
    "/v1/responses": lambda text: {"model": "policy", "input": text},
    "/v1/messages": lambda text: {
        "model": "policy",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": text}],
    },
}
