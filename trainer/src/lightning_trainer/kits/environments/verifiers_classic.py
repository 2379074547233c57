"""Environments of verifiers before 0.4: ``load_environment(...)`` returns data sets, a loop and a rubric."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.spans import Json
from lightning_trainer.kits.environments.endpoint import endpoint

_LOCK: Final = threading.Lock()


def tasks(
    name: str, options: Mapping[str, Any], count: int, held_out: int
) -> tuple[Sequence[dict[str, Json]], Sequence[dict[str, Json]]]:
    """Return the first rows of the training data. Held-out rows are from the evaluation data if there are any."""
    environment = _load_environment(name, json.dumps(dict(options), sort_keys=True))
    environment.build_eval_dataset()
    if environment.eval_dataset is not None:
        return _rows(environment.get_dataset(n=count)), _rows(environment.get_eval_dataset(n=held_out), held_out)
    rows = _rows(environment.get_dataset(n=count + held_out))
    cut = max(0, len(rows) - held_out)
    return rows[:cut][:count], rows[cut:]


async def play(name: str, options: Mapping[str, Any], task: Mapping[str, Any]) -> float:
    """Run the environment's loop on a row, and return its rubric's reward.

    Raises:
        AgentFailedError: the loop failed.
    """
    import verifiers

    environment = await asyncio.to_thread(_load_under_lock, name, json.dumps(dict(options), sort_keys=True))
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


def _load_under_lock(name: str, options: str) -> Any:
    with _LOCK:  # several attempts begin at once, and it is loaded once
        return _load_environment(name, options)


@functools.lru_cache(maxsize=4)
def _load_environment(name: str, options: str) -> Any:
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"environment {name!r} is of verifiers before 0.4, and {verifiers.__version__} is installed. Run: pip"
            " install 'verifiers<0.4', or install the environment's newer version."
        )
    with _leaving_signals(sys.modules[verifiers.Environment.__module__]):
        return verifiers.load_environment(name, **json.loads(options))


class _IgnoredSignals:
    """The part of `signal` that verifiers 0.3 uses, without effect."""

    SIGINT = signal.SIGINT
    SIGTERM = signal.SIGTERM
    default_int_handler = staticmethod(signal.default_int_handler)

    @staticmethod
    def signal(_number: int, _handler: object) -> None: ...


@contextmanager
def _leaving_signals(module: Any) -> Iterator[None]:
    """Keep environments from handling Ctrl-C and SIGTERM: the runner does, and a thread must not.

    Each environment of verifiers 0.3 sets handlers when it is made. Their cleanup also runs when Python exits.
    """
    kept = getattr(module, "signal", None)
    if kept is not signal:
        yield
        return
    module.signal = _IgnoredSignals
    try:
        yield
    finally:
        module.signal = kept


def _rows(data: Any, most: int | None = None) -> list[dict[str, Json]]:
    rows = [dict(row) for row in data]
    return rows if most is None else rows[:most]
