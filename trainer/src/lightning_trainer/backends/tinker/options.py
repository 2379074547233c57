"""The options of a run on a Tinker server, and those that it does not support. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker.bill import Prices, read_prices
from lightning_trainer.backends.tinker.service import Patience
from lightning_trainer.backends.torch.backend import learner_options, need_torch
from lightning_trainer.backends.torch.options import TorchOptions, make_options
from lightning_trainer.choices import SELF
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models import SMOLLM2, look
from lightning_trainer.policies import DEFAULT_RANK
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.distil import at_endpoint

_OWN: Final = ("base_model", "down_s", "slow_s")  # backend_options of this backend, not of the learner
_HERE: Final = (  # options of a learner with the weights in its own memory
    "slots", "threads", "generate_threads", "lora_targets", "micro_batch_tokens", "activation_checkpointing",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """How a server trains the policies of a run.

    Attributes:
        url: of the server.
        base_model: the server's name of the model; None: the model's own, which the server must know.
        learner: loss, optimiser, adapters and the rest, as for every learner.
        patience: how long to wait for the server.
        prices: file with a table of prices; None: the built-in one.
        max_cost: maximum cost of the run; None: unlimited.
    """

    url: str
    learner: TorchOptions
    base_model: str | None = None
    patience: Patience = field(default_factory=Patience)
    prices: Path | None = None
    max_cost: float | None = None

    @property
    def served_base(self) -> str:
        """The name of the model that the server must know."""
        if self.base_model is not None:
            return self.base_model
        folder = look(str(self.learner.model)).folder
        here = folder is not None and (self.learner.model.is_dir() or str(self.learner.model) == SMOLLM2)
        return str(folder.resolve()) if here and folder else str(self.learner.model).partition("@")[0]

    def read_prices(self) -> Prices | None:
        """Return the prices of the model; None if they are unknown.

        Raises:
            ConfigError: a given table lacks them, or they are unknown although a limit was set.
        """
        prices = read_prices(self.served_base, self.prices)
        if prices is None and self.max_cost is not None:
            raise ConfigError(
                f"max_cost needs prices, and the price table has none of {self.served_base}. Name a table with"
                " --prices FILE."
            )
        return prices


def options_of(config: TrainConfig) -> TinkerOptions:
    """Return the options of a run.

    Raises:
        ConfigError: one is missing or wrong.
    """
    if config.tinker_url is None:
        raise ConfigError("backend = tinker needs the server's URL. Set it with --tinker-url http://HOST:PORT.")
    server = {"tinker_url": config.tinker_url, "prices": config.prices, "max_cost": config.max_cost}
    return make(config.model, {**learner_options(config), **server})


def make(model: str, values: dict[str, Any]) -> TinkerOptions:
    """Create options from keyword arguments: the learner's, and this backend's.

    Raises:
        ConfigError: a name is unknown, a value is out of range, a server does not support an option, or there is no
            URL.
    """
    rest = dict(values)
    url = rest.pop("tinker_url", None)
    if not url:
        raise ConfigError("backend = tinker needs the server's URL: --backend-options tinker_url=http://HOST:PORT.")
    own = {name: rest.pop(name, None) for name in (*_OWN, "prices", "max_cost")}
    rest.setdefault("lora_rank", DEFAULT_RANK)
    _check_learner(rest)
    patience = {name: float(own[name]) for name in ("down_s", "slow_s") if own[name] is not None}
    if any(seconds <= 0 for seconds in patience.values()):
        raise ConfigError("down_s and slow_s must be above 0.")
    return TinkerOptions(
        url=str(url).rstrip("/"),
        learner=make_options(model, rest),
        base_model=own["base_model"],
        patience=Patience(**patience),
        prices=own["prices"],
        max_cost=own["max_cost"],
    )


def _check_learner(values: Mapping[str, Any]) -> None:
    """Reject options of the learner that a server does not support.

    Raises:
        ConfigError: the message says which option, and what to do.
    """
    given = [name for name in ("dtype", "device") if values.get(name, "auto") != "auto"]
    given += [name for name in _HERE if name in values]
    refuse(
        {
            "lora_rank = 0 trains all weights, and a Tinker server trains adapters only. Give a rank of 1 or more, or"
            " leave it out.": not values["lora_rank"],
            "with backend = tinker the server sets lora_alpha. Leave it out.": values.get("lora_alpha") is not None,
            "fixed adapters can't be loaded into a Tinker server. Use AGENT=lora or AGENT=base.": bool(
                values.get("fixed")
            ),
            f"{', '.join(given)}: only for a learner on this machine. With backend = tinker, leave it out.": bool(
                given
            ),
        }
    )


def check(config: TrainConfig) -> None:
    """Reject options that a server does not support, without contacting it.

    Raises:
        ConfigError: the message says which option, and what to do.
    """
    algorithm = algorithm_by_name(config.algorithm)
    elsewhere = (config.engine, config.engine_python, config.engine_url, config.engine_gpus)
    refuse(
        {
            "workers = 0 needs backend = verl: only it serves runners on other machines. Set workers to 1 or more.": (
                config.workers == 0
            ),
            f"algorithm = {config.algorithm} needs a value head, which a Tinker server does not train. Use grpo, rloo"
            " or reinforce++.": algorithm.critic,
            "entropy_coef needs the probabilities of all tokens, which a Tinker server does not send. Set it to 0.": (
                config.entropy_coef > 0
            ),
            "teacher = self needs the most probable tokens at each position, which a Tinker server does not send."
            " Name a teacher as MODEL=URL.": config.teacher == SELF,
            f"teacher = {config.teacher}: with backend = tinker, name a teacher as MODEL=URL of a vLLM server.": (
                config.teacher not in (None, SELF) and not at_endpoint(config.teacher)
            ),
            f"temperature = {config.temperature}: a Tinker server gives log-probabilities at temperature 1 only. Set it"
            " to 1.": config.temperature != 1.0,
            "sampling = asked needs to know which tokens top_p and similar parameters changed, which a Tinker server"
            " does not report. Use sampling = plain.": config.sampling != "plain",
            "engine and its options need backend = torch, because a Tinker server samples itself. Leave them out.": (
                any(each is not None for each in elsewhere) or bool(config.engine_options)
            ),
            "gpus, nodes and verl are options of backend = verl. Leave them out.": (
                (config.gpus, config.nodes, dict(config.verl)) != (1, 1, {})
            ),
            "rollback_on_cliff needs backend = torch. Leave it out.": (config.rollback_on_cliff),
        }
    )
    options_of(config).read_prices()
    if find_spec("tinker") is None:
        raise ConfigError(
            'backend = tinker needs the SDK, not installed here. Run: pip install "lightning-trainer[torch,tinker]"'
        )
    need_torch()
    look(config.model)
