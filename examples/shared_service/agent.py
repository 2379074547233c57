"""An agent whose workers all reach one index: over a URL where INDEX_URL names one, else as a named actor on Ray."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen


async def search(question: str) -> str:
    """Ask the index, wherever it is."""
    if url := os.environ.get("INDEX_URL"):
        return await asyncio.to_thread(_over_http, url, question)
    return await _on_ray().search.remote(question)


def _over_http(url: str, question: str) -> str:
    with urlopen(f"{url}/search?q={quote(question)}", timeout=30) as answer:  # noqa: S310 - our own URL
        return json.load(answer)["text"]


def _on_ray() -> Any:
    """Return the one actor of the cluster; whoever comes first starts it, and it outlives them all."""
    import ray
    from index import Index

    if not ray.is_initialized():  # a worker outside Ray, on a machine of the cluster
        ray.init(address="auto")
    options = {"name": "index", "namespace": "shared", "lifetime": "detached", "get_if_exists": True}
    return ray.remote(Index).options(**options, num_cpus=0, max_restarts=-1, max_concurrency=8).remote()


async def run(task: dict[str, Any]) -> float:
    """Answer a task; the reward is whether the right text was found."""
    return float(task["word"] in await search(task["question"]))
