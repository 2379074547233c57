"""Environments of verifiers before 0.4: ``load_environment(...)`` gives data sets, a loop and a rubric."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.spans import Json
from lightning_trainer.environments.endpoint import endpoint

_LOCK: Final = threading.Lock()


def tasks(
    name: str, options: Mapping[str, Any], count: int, held_out: int
) -> tuple[Sequence[dict[str, Json]], Sequence[dict[str, Json]]]:
    """Return the first rows of its training data; held-out ones are of its evaluation data where it has some."""
    environment = _loaded(name, json.dumps(dict(options), sort_keys=True))
    environment.build_eval_dataset()
    if environment.eval_dataset is not None:
        return _rows(environment.get_dataset(n=count)), _rows(environment.get_eval_dataset(n=held_out), held_out)
    rows = _rows(environment.get_dataset(n=count + held_out))
    cut = max(0, len(rows) - held_out)
    return rows[:cut][:count], rows[cut:]


async def play(name: str, options: Mapping[str, Any], task: Mapping[str, Any]) -> float:
    """Run its loop on a row, and return its rubric's reward.

    Raises:
        AgentFailedError: the loop failed.
    """
    import verifiers

    environment = await asyncio.to_thread(_locked, name, json.dumps(dict(options), sort_keys=True))
    there = endpoint()
    async with there.client() as client:
        output = await environment.run_rollout(
            dict(task),
            verifiers.OpenAIChatCompletionsClient(client),
            there.model,
            dict(environment.sampling_args or {}),
        )
    if output.get("error"):
        raise AgentFailedError(f"environment {name}: {output['error']}")
    return float(output["reward"])


def _locked(name: str, options: str) -> Any:
    with _LOCK:  # several attempts begin together, and it is loaded once
        return _loaded(name, options)


@functools.lru_cache(maxsize=4)
def _loaded(name: str, options: str) -> Any:
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"environment {name!r} is of verifiers before 0.4, and {verifiers.__version__} is installed. Run: pip"
            " install 'verifiers<0.4', or install the environment's newer version."
        )
    return verifiers.load_environment(name, **json.loads(options))


def _rows(data: Any, most: int | None = None) -> list[dict[str, Json]]:
    rows = [dict(row) for row in data]
    return rows if most is None else rows[:most]
