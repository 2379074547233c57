"""The cost of a run if tokens are billed: counted when they are sent, priced by a dated table."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from lightning_spans.errors import ConfigError
from lightning_trainer.backend_protocol import UpdateRefusedError
from lightning_trainer.rl.rows import Row

_LOOK_S: Final = 0.05  # between checks whether answers in progress have ended


class BudgetSpentError(UpdateRefusedError):
    """The next operation would cost more than is left of `max_cost`."""

    exit_status = 5


class Updates(Protocol):
    """The options that decide how often an update reads and trains its rows."""

    @property
    def update_epochs(self) -> int: ...  # noqa: D102

    @property
    def minibatches(self) -> int: ...  # noqa: D102

    @property
    def kl_coef(self) -> float: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a model, in the table's currency per token.

    Attributes:
        prefill: of a prompt token, and of a token that a forward pass reads.
        cached: of a prompt token that the server has cached.
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
    """Numbers of billed tokens.

    Attributes:
        prompt: read before sampling.
        cached: those of them that the server had cached.
        sampled: by the server.
        read: by forward passes.
        trained: of training sequences.
        unmerged: what `read` and `trained` would have been together if each call had been a separate sequence.
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
        """Return the counts multiplied by a factor."""
        return TokenCount(**{each.name: factor * getattr(self, each.name) for each in fields(TokenCount)})

    def cost(self, prices: Prices) -> float:
        """Return their cost."""
        sampling = (self.prompt - self.cached) * prices.prefill + self.cached * prices.cached
        return sampling + self.sampled * prices.sample + self.read * prices.prefill + self.trained * prices.train

    def unmerged_cost(self, prices: Prices) -> float:
        """Return what they would have cost if each call had been a separate training sequence."""
        learned = self.read + self.trained
        share = self.unmerged / learned if learned else 0.0
        return self.cost(prices) + (share - 1.0) * (self.read * prices.prefill + self.trained * prices.train) * bool(
            learned
        )


def read_prices(model: str, file: Path | None) -> Prices | None:
    """Return the prices of a model; None if the table has none.

    Args:
        model: the server's name of it.
        file: a table that replaces the built-in one.

    Raises:
        ConfigError: the table cannot be read, or a given table lacks the model.
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
        prices: of the model; None: only count tokens.
        limit: maximum cost of the run; None: unlimited.
        spent: cost of its earlier parts.
    """

    def __init__(self, prices: Prices | None, limit: float | None = None, spent: float = 0.0) -> None:
        self.prices, self.limit, self.before = prices, limit, spent
        self._lock = threading.Lock()
        self._total = TokenCount()
        self._told = TokenCount()
        self._dearest = 0.0
        self._reserved = 0.0  # maximum cost of the answers in progress
        self._ended: BudgetSpentError | None = None

    @asynccontextmanager
    async def reserved(self, tokens: TokenCount) -> AsyncIterator[None]:
        """Reserve the maximum cost of an answer; wait for those in progress if both might not fit.

        Raises:
            BudgetSpentError: it might cost more than is left. `check` raises it from then on.
        """
        cost = 0.0 if self.limit is None or self.prices is None else tokens.cost(self.prices)
        while not self._reserve(cost, tokens):  # noqa: ASYNC110 - callers are on several event loops
            await asyncio.sleep(_LOOK_S)
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= cost

    def _reserve(self, cost: float, tokens: TokenCount) -> bool:
        left = self._left()
        if cost > left:
            what = f"an answer of up to {tokens.sampled:,.0f} tokens"
            self._ended = self._spent_error(what, cost, "a larger --max-cost or a smaller --max-tokens")
            raise self._ended
        with self._lock:
            fits = cost + self._reserved <= left
            self._reserved += cost if fits else 0.0
        return fits

    def check_update(self, tokens: float, options: Updates) -> None:
        """Reject an update on so many predicted tokens if it would cost more than is left.

        Raises:
            BudgetSpentError: the message says what it would cost.
        """
        cost = 0.0 if self.prices is None else update_tokens(tokens, options).cost(self.prices)
        if cost > self._left():
            raise self._spent_error("the update", cost)

    def _left(self) -> float:
        return math.inf if self.limit is None or self.prices is None else self.limit - self.spent

    def _spent_error(self, what: str, cost: float, remedy: str = "a larger --max-cost") -> BudgetSpentError:
        as_of = "" if self.prices is None else f" (prices of {self.prices.as_of})"
        return BudgetSpentError(
            f"max_cost = {self.limit:g}: {self.spent:.4g} is spent{as_of}, and {what} costs up to {cost:.2g}. The"
            f" run is saved: continue with --resume and {remedy}."
        )

    def add(self, tokens: TokenCount) -> None:
        """Count tokens."""
        with self._lock:
            self._total += tokens

    @property
    def total(self) -> TokenCount:
        """Tokens counted since the program began."""
        with self._lock:
            return self._total

    @property
    def spent(self) -> float:
        """The cost of the run, including its earlier parts; 0 without prices."""
        return self.before + (self.total.cost(self.prices) if self.prices else 0.0)

    def of_step(self) -> dict[str, float]:
        """Return the metrics of the tokens billed since the last call."""
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
        """Stop a run that cannot pay for another step as expensive as the most expensive so far.

        Raises:
            BudgetSpentError: the message says what was spent, and how to continue.
        """
        if self._ended is not None:
            raise self._ended
        if self.limit is None or self.prices is None:
            return
        with self._lock:
            open_step = (self._total - self._told).cost(self.prices)
        if max(self._dearest - open_step, 0.0) > self._left():
            raise self._spent_error("another step", self._dearest)


def update_tokens(tokens: float, options: Updates) -> TokenCount:
    """Return the tokens that an update on so many predicted tokens sends; an upper bound if there are minibatches.

    All rows are read before the first step. Each further step reads its rows again.
    """
    epochs = options.update_epochs
    again = 0 if (epochs, options.minibatches) == (1, 1) else epochs
    return TokenCount(read=tokens * (1 + again), trained=tokens * epochs, prompt=tokens * (options.kl_coef > 0))


def unmerged_tokens(rows: Iterable[Row]) -> int:
    """Count the predicted tokens of rows as if each call were a separate row."""
    total = 0
    for row in rows:
        places = np.flatnonzero(row.mask)
        total += int(sum(places[end - 1] for end in np.cumsum(row.lengths) if end))
    return total


def bill_lines(
    prices: Prices | None,
    step: Mapping[str, Any],
    options: Updates,
    *,
    steps: float,
    validations: float,
) -> dict[str, Any]:
    """Forecast a bill.

    Args:
        prices: of the model; None: unknown.
        step: tokens of a step: `prompt`, `sampled`, `rows`, `unmerged`.
        options: of updates.
        steps: of the run.
        validations: all of them together, in units of a step's rollouts.
    """
    sampling = TokenCount(prompt=step["prompt"], sampled=step["sampled"]).times(steps + validations)
    sent = update_tokens(step["rows"], options)
    learning = replace(sent, unmerged=(sent.read + sent.trained) / (step["rows"] or 1) * step["unmerged"]).times(steps)
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
