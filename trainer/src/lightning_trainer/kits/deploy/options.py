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
    """Age of a conversation from which its outcome counts."""
    worse: float = _PROMISES.worse
    """Outcome lost by a candidate that must not be promoted."""
    better: float = _PROMISES.better
    """Outcome gained by a candidate to be promoted."""
    false_promotion: float = _PROMISES.false_promotion
    """Largest probability that the worse one is promoted."""
    power: float = _PROMISES.power
    """Smallest probability that the better one is promoted."""
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
