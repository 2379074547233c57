"""The backend named ``tinker``: from a run's configuration to a learner on a server.

Imports neither torch nor the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_trainer.backends.tinker import options
from lightning_trainer.backends.tinker.bill import bill_lines
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.policies import DEFAULT_RANK
from lightning_trainer.run.embedded import EmbeddedBackend

if TYPE_CHECKING:
    from lightning_trainer.backends.tinker.learner import TinkerLearner

DEFAULTS: Final = {"temperature": 1.0, "lora_rank": DEFAULT_RANK}


class TinkerBackend(EmbeddedBackend):
    """`Backend` with adapters on a server as its policies."""

    defaults: Mapping[str, Any] = DEFAULTS  # of `TrainConfig` options that are not set
    takes = frozenset({"tinker_url", "max_cost", "prices"})

    def __init__(self) -> None:
        super().__init__(_open, options.check, loaded=_load_learner, priced=_forecast_cost)


def _open(config: TrainConfig) -> TinkerLearner:
    """Create the adapters of a run."""
    from lightning_trainer.backends.tinker.learner import TinkerLearner

    return TinkerLearner(options.options_of(config))


def _load_learner(model: str, values: Mapping[str, Any]) -> TinkerLearner:
    """Create adapters to learn from data."""
    from lightning_trainer.backends.tinker.learner import TinkerLearner

    return TinkerLearner(options.make(model, dict(values)))


def _forecast_cost(config: TrainConfig, facts: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Forecast a run's bill from the tokens of one step."""
    prices = options.options_of(config).read_prices()
    step = {
        "prompt": facts["tokens_prompt_step"], "sampled": facts["tokens_generated_step"],
        "rows": facts["rows_tokens_step"] * facts["learned_share"],
        "unmerged": facts["call_tokens_step"] * facts["learned_share"],
    }  # fmt: skip
    bill = bill_lines(prices, step, config, steps=facts["steps"], validations=facts["validation_steps"])
    told = [
        (
            f"the bill: {bill['tokens_prompt']:,} prompt tokens, {bill['tokens_sampled']:,} sampled,"
            f" {bill['tokens_trained']:,} read and trained ({bill['tokens_unmerged']:,} without merging)"
        )
    ]
    if "cost" in bill:
        told.append(
            f"  {bill['cost']:.4g} at the prices of {bill['prices_of']}; {bill['cost_unmerged']:.4g} without merging"
        )
    else:
        told.append("  no prices of this model are known: give a table with --prices FILE")
    return {"bill": bill}, told
