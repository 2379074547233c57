"""What a run costs where tokens are billed: counted as they are sent, priced by a table with a date."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer.rl.rows import Row


class BudgetSpentError(LightningError):
    """The next step would cost more than is left of `max_cost`."""

    exit_status = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a model, in the table's currency for each token.

    Attributes:
        prefill: of a prompt token, and of a token that is read by a forward pass.
        cached: of a prompt token that the server still had.
        sample: of a sampled token.
        train: of a token of a training sequence.
        as_of: day on which the prices were read.
    """

    prefill: float
    cached: float
    sample: float
    train: float
    as_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens that are billed.

    Attributes:
        prompt: that were read before sampling.
        cached: of them, those that the server still had.
        sampled: drawn.
        read: by forward passes.
        trained: of training sequences.
        unmerged: what `read` and `trained` had been in all, had each call been a sequence of its own.
    """

    prompt: float = 0
    cached: float = 0
    sampled: float = 0
    read: float = 0
    trained: float = 0
    unmerged: float = 0

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(TokenCount)}
        )

    def __sub__(self, other: TokenCount) -> TokenCount:
        return self + other.times(-1)

    def times(self, factor: float) -> TokenCount:
        """Return so many times these."""
        return TokenCount(**{each.name: factor * getattr(self, each.name) for each in fields(TokenCount)})

    def cost(self, prices: Prices) -> float:
        """Return what they cost."""
        sampling = (self.prompt - self.cached) * prices.prefill + self.cached * prices.cached
        return sampling + self.sampled * prices.sample + self.read * prices.prefill + self.trained * prices.train

    def unmerged_cost(self, prices: Prices) -> float:
        """Return what they had cost, had each call been a training sequence of its own."""
        learned = self.read + self.trained
        share = self.unmerged / learned if learned else 0.0
        return self.cost(prices) + (share - 1.0) * (self.read * prices.prefill + self.trained * prices.train) * bool(
            learned
        )


def read_prices(model: str, file: Path | None) -> Prices | None:
    """Return the prices of a model; None where the table has none.

    Args:
        model: as the server names it.
        file: a table that replaces ours.

    Raises:
        ConfigError: the table can't be read, or lacks the model although it was named.
    """
    where = str(file) if file is not None else "the price table"
    try:
        table = files(__package__) / "prices.json" if file is None else file
        values = json.loads(table.read_text(encoding="utf-8"))
        per, models = float(values.get("per", 1)), values["models"]
        if model not in models:
            if file is None:
                return None
            raise ConfigError(f"{where} has no prices of {model}; it has {', '.join(sorted(models)) or 'none'}.")
        own = {name: float(models[model][name]) / per for name in ("prefill", "sample", "train")}
        cached = float(models[model].get("cached", models[model]["prefill"])) / per
        if min(*own.values(), cached) < 0:
            raise ValueError("a price is below 0")
        return Prices(**own, cached=cached, as_of=str(values["as_of"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} can't be read: {type(error).__name__}: {error}. Write it as docs/how-to/tinker.md shows."
        ) from None


class Bill:
    """Counts tokens, from any thread, and stops a run in time.

    Args:
        prices: of the model; None: only tokens are counted.
        limit: most that the run may cost; None: any amount.
        spent: what its earlier parts cost.
    """

    def __init__(self, prices: Prices | None, limit: float | None = None, spent: float = 0.0) -> None:
        self.prices, self.limit, self.before = prices, limit, spent
        self._lock = threading.Lock()
        self._total = TokenCount()
        self._told = TokenCount()
        self._dearest = 0.0

    def add(self, tokens: TokenCount) -> None:
        """Count tokens."""
        with self._lock:
            self._total += tokens

    @property
    def total(self) -> TokenCount:
        """Tokens since the program began."""
        with self._lock:
            return self._total

    @property
    def spent(self) -> float:
        """What the run has cost, its earlier parts included; 0 without prices."""
        return self.before + (self.total.cost(self.prices) if self.prices else 0.0)

    def of_step(self) -> dict[str, float]:
        """Return the metrics of what was billed since the last call."""
        with self._lock:
            now = self._total - self._told
            self._told = self._total
        found = {
            "billed_prompt": now.prompt, "billed_sampled": now.sampled, "billed_trained": now.read + now.trained,
            "billed_unmerged": now.unmerged,
        }  # fmt: skip
        if self.prices is None:
            return found
        self._dearest = max(self._dearest, now.cost(self.prices))
        return found | {
            "cost": now.cost(self.prices),
            "cost_unmerged": now.unmerged_cost(self.prices),
            "cost_total": self.spent,
        }

    def check(self) -> None:
        """Stop a run that has no money left for another step as dear as the dearest so far.

        Raises:
            BudgetSpentError: says what was spent, and how to continue.
        """
        if self.limit is None or self.prices is None:
            return
        with self._lock:
            open_step = (self._total - self._told).cost(self.prices)
        needed = max(self._dearest - open_step, 0.0)
        if self.spent + needed > self.limit:
            raise BudgetSpentError(
                f"max_cost = {self.limit:g}: {self.spent:.4g} is spent (prices of {self.prices.as_of}), and another"
                f" step costs up to {self._dearest:.2g}. It is saved: continue with --resume and a larger --max-cost."
            )


def unmerged_tokens(rows: Iterable[Row]) -> int:
    """Count the predicted tokens of rows, had each call been a row of its own."""
    total = 0
    for row in rows:
        places = np.flatnonzero(row.mask)
        total += int(sum(places[end - 1] for end in np.cumsum(row.lengths) if end))
    return total


def bill_lines(prices: Prices | None, step: Mapping[str, Any], *, steps: float, validations: float) -> dict[str, Any]:
    """Forecast a bill.

    Args:
        prices: of the model; None: unknown.
        step: tokens of a step: `prompt`, `sampled`, `rows`, `unmerged`.
        steps: of the run.
        validations: all of them together, in rollouts of a step.
    """
    sampling = TokenCount(prompt=step["prompt"], sampled=step["sampled"]).times(steps + validations)
    learning = TokenCount(read=step["rows"], trained=step["rows"], unmerged=2 * step["unmerged"]).times(steps)
    tokens = sampling + learning
    found: dict[str, Any] = {
        "tokens_prompt": round(tokens.prompt), "tokens_sampled": round(tokens.sampled),
        "tokens_trained": round(tokens.read + tokens.trained), "tokens_unmerged": round(tokens.unmerged),
    }  # fmt: skip
    if prices is not None:
        found |= {
            "cost": round(tokens.cost(prices), 4),
            "cost_unmerged": round(tokens.unmerged_cost(prices), 4),
            "prices_of": prices.as_of,
        }
    return found
