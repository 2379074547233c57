"""Options of a canary and its gate, shared by `deploy canary` and the loop."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from lightning_trainer.kits.deploy.gate import Bounds
from lightning_trainer.kits.deploy.outcomes import GateRules
from lightning_trainer.options.record import OptionRecord

_PROMISES: Final = Bounds()


class CanaryOptions(OptionRecord):
    """Options of a canary and its gate."""

    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the conversations."""
    outcomes: tuple[str, ...] = ()
    """Rewards that count. Default: all."""
    wait_days: float = Field(default=0.0, ge=0.0)
    """Age after which the outcome of a conversation counts."""
    worse: float = _PROMISES.worse
    """Loss of outcome at which a candidate must not be promoted."""
    better: float = _PROMISES.better
    """Gain of outcome at which a candidate is promoted."""
    false_promotion: float = _PROMISES.false_promotion
    """Maximum probability of promoting the worse policy."""
    power: float = _PROMISES.power
    """Minimum probability of promoting the better policy."""
    guards: dict[str, float] = Field(default_factory=dict)
    """How much larger the candidate's share of such calls may be, by guardrail."""

    @property
    def rules(self) -> GateRules:
        """The rules of the gate.

        Raises:
            ConfigError: a bound or a guardrail is invalid.
        """
        bounds = Bounds(worse=self.worse, better=self.better, false_promotion=self.false_promotion, power=self.power)
        return GateRules(bounds=bounds, sources=self.outcomes, wait_s=self.wait_days * 86_400.0, guardrails=self.guards)
