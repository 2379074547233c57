"""`[train] method = "model"`: nothing is learned; the candidate is a model that the server has, such as a vendor's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.loop.methods.method import ENDPOINT, MODEL, SERVED, RoundInput
from lightning_trainer.kits.loop.record import StageResult
from lightning_trainer.report.progress import Progress

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

_OWNED: Final = ("target", "command", "data", "out", "agents", "model", "against", "samples", "prompts", "store")
_NEEDED: Final = {"served": "gpt-next", "endpoint": "gpt-next=https://api.example/v1"}


class ServedMethod:
    """Tries a model of the server."""

    needs_base = False
    forecast_by = None

    def check(self, config: LoopConfig) -> None:
        """Reject invalid options."""
        options = config.method_options
        for name, example in _NEEDED.items():
            if not isinstance(options.get(name), str):
                raise ConfigError(f'train.{name} is missing. Write {name} = "{example}".')
        if owned := [name for name in options if name in _OWNED]:
            raise ConfigError(f"train.{owned[0]}: the loop sets this option. Leave it out.")
        if config.evaluate.against is None:
            raise ConfigError(
                "evaluate.against is missing: the model that answers today, such as gpt=https://api.example/v1."
            )
        EvalConfig(**self.eval_options(config, RoundInput(data=Path("t"), out=Path("run"))), data=Path("t"))

    def learn(self, config: LoopConfig, given: RoundInput, progress: Progress) -> StageResult:  # noqa: ARG002
        """Learn nothing."""
        served = config.method_options["served"]
        if given.stable == served:
            return StageResult({}, "rejected", f"{served} already is the stable policy")
        facts = {SERVED: served, ENDPOINT: config.method_options["endpoint"], MODEL: str(config.evaluate.against)}
        return StageResult(facts)

    def eval_options(self, config: LoopConfig, given: RoundInput) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the table's other options, which are those of `eval`."""
        own = {name: value for name, value in config.method_options.items() if name not in _NEEDED}
        return {**own, "target": config.target, "agents": (config.agent,)}

    def cost(self, config: LoopConfig, given: RoundInput, tasks: int) -> Mapping[str, int]:  # noqa: ARG002
        """Return nothing: it costs nothing."""
        return {"rollouts": 0}
