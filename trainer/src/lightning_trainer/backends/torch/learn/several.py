"""One batch for several adapters: the rows of each, and combined metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.rl.rows import Row

_SUMS: Final = frozenset({"tokens", "taught_tokens", "packed_tokens", "skipped", "seconds"})
_HIGHEST: Final = frozenset({"ratio_max"})


def by_adapter(rows: Sequence[Row], options: TorchOptions) -> dict[str, list[Row]]:
    """Return for each adapter the rows that it answered, in the order of the adapters.

    Adapters without a row that has a gradient are left out, because their optimiser would move them by momentum alone.

    Raises:
        ValueError: a row was answered by none of them, or by one that is not trained.
    """
    found: dict[str, list[Row]] = {adapter: [] for adapter in options.adapters if adapter not in options.fixed}
    for row in rows:
        if row.policy not in found:
            raise ValueError(f"a row of {row.agent} was answered by {row.policy!r}, not by {', '.join(found)}")
        found[row.policy].append(row)
    return {
        adapter: own
        for adapter, own in found.items()
        if any(row.has_gradient for row in own) or (own and options.learns_from_flat_rows)
    }


def combine_metrics(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates: each with the suffix ``/NAME``, and over all under its own name."""
    every = {f"{name}/{adapter}": value for adapter, own in found.items() for name, value in own.items()}
    names = dict.fromkeys(name for own in found.values() for name in own)
    return {**{name: _over_all(name, list(found.values())) for name in names}, **every}


def _over_all(name: str, each: Sequence[Mapping[str, float]]) -> float:
    values = [own.get(name, 0.0) for own in each]
    if name in _SUMS:
        return sum(values)
    if name in _HIGHEST:
        return max(values)
    tokens = [own.get("taught_tokens" if name == "teacher_kl" else "tokens", 0.0) for own in each]
    return sum(value * count for value, count in zip(values, tokens, strict=True)) / (sum(tokens) or 1.0)
