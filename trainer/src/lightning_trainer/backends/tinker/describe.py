"""The capabilities of a Tinker server, measured in about a minute, for `lightning-rl doctor --tinker URL`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker.adapter import Adapter, prompt_logprobs
from lightning_trainer.backends.tinker.errors import PAIRS, TinkerError
from lightning_trainer.backends.tinker.probe import examine
from lightning_trainer.backends.tinker.service import Patience, Service, sdk_version

LOSSES: Final = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro")
_RANK: Final = 8
_MOST: Final = 2  # adapters to create at once: one for each of two agents


def describe(url: str, model: str | None = None) -> dict[str, Any]:
    """Return the capabilities of a server.

    Args:
        url: of the server.
        model: the server's name of a model to try; None: its first.

    Returns:
        ``server``, ``sdk``, ``models``, ``averages``, ``clips``, ``snapshots``, ``losses``, ``adapters`` (created at
        once, 2 at most) and ``fits``: whether the backend works with this server and SDK.

    Raises:
        LightningError: the server is down or refuses, or training on it would not be exact.
    """
    service = Service(url.rstrip("/"), Patience(down_s=20.0, slow_s=600.0))
    models = service.models()
    if not models or (model is not None and model not in models):
        raise ConfigError(f"the Tinker server {url} has the models: {', '.join(sorted(models)) or 'none'}.")
    base = model or next(iter(models))
    adapters = list(_open_adapters(service, base))
    try:
        findings = examine(adapters[0])
        losses = [name for name in LOSSES if _takes(adapters[0], name)]
        fits = _samples(adapters[0]) and "importance_sampling" in losses
    finally:
        for adapter in adapters:
            service.unload(adapter.model_id)
    scaling = findings.scaling
    over = (["tokens"] if scaling.tokens else []) + ([] if scaling.sequences == "nothing" else [scaling.sequences])
    return {
        "server": url,
        "sdk": sdk_version(),
        "models": list(models),
        "averages": " and ".join(over) or "nothing",
        "clips": findings.clips,
        "snapshots": findings.snapshots,
        "losses": losses,
        "adapters": len(adapters),
        "fits": fits,
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines of text for people."""
    shared = "" if facts["snapshots"] else "; it samples from the weights in training, so answers wait for updates"
    more = "" if facts["adapters"] < _MOST else " or more"
    clips = "clips gradients" if facts["clips"] else "does not clip gradients: max_grad_norm has no effect"
    return [
        f"models: {', '.join(facts['models'])}; adapters at once: {facts['adapters']}{more}",
        f"gradients are averaged over {facts['averages']}, which is undone; the server {clips}{shared}",
        f"losses: {', '.join(facts['losses'])}",
        f"tinker {facts['sdk']} fits" if facts["fits"] else f"tinker {facts['sdk']} does not fit: {PAIRS}",
    ]


def _open_adapters(service: Service, base: str) -> Iterator[Adapter]:
    """Create adapters. Only the first must succeed."""
    yield Adapter(service, service.adapter(base, _RANK, 0))
    with suppress(TinkerError):
        yield Adapter(service, service.adapter(base, _RANK, 1))


def _takes(adapter: Adapter, loss: str) -> bool:
    tokens = np.array([1, 3, 4, 5, 3], np.int32)
    zeros = np.zeros(4, np.float32)
    weighed = {"weights": zeros + 1} if loss == "cross_entropy" else {"logprobs": zeros, "advantages": zeros}
    try:
        asked = adapter.client.forward([adapter.datum(tokens, tokens[1:], **weighed)], loss)
        adapter.service.wait(asked, f"compute the loss {loss}")
    except Exception:  # noqa: BLE001 - the SDK refuses names that it does not know with errors of its own
        return False
    return True


def _samples(adapter: Adapter) -> bool:
    try:
        prompt_logprobs(adapter.service, adapter.sampler(), np.array([1, 3, 4, 5, 3], np.int32))
    except TinkerError:
        return False
    return True
