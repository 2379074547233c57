"""The configuration of a loop: a TOML file with a table for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.kits.deploy.options import CanaryOptions
from lightning_trainer.kits.deploy.shadow.comparison import RULES, ShadowRules
from lightning_trainer.options.permits import PermitOptions
from lightning_trainer.options.record import OptionRecord

_Share: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0)]


class SelectTable(PermitOptions):
    """Which traces become tasks: those that are permitted by the options of `PermitOptions`.

    Attributes:
        origin: origin of the traces.
        task_field: task field that gets the user's text.
        least: number of new tasks that starts a round.
        held_out: share of the tasks that are used to evaluate the candidate, not to train it.
        min_age_minutes: age in minutes from which a trace counts, so that its conversation has ended.
    """

    origin: str = "live"
    task_field: str = "question"
    least: int = Field(default=100, ge=2)
    held_out: float = Field(default=0.2, gt=0.0, lt=1.0)
    min_age_minutes: float = Field(default=10.0, ge=0.0)


class EvaluateTable(OptionRecord):
    """How the candidate is compared before any user gets its answers.

    Attributes:
        samples: rollouts per held-out task.
        against: what it is compared with, as in `eval --against`; None: the model that training starts from.
        min_difference: the round ends if the mean difference in reward is lower.
    """

    samples: int = Field(default=4, ge=1)
    against: str | None = None
    min_difference: float = 0.0


class ShadowTable(OptionRecord):
    """The shadow, as in `deploy shadow`.

    Attributes:
        share: share of the conversations.
        copies: number of copies after which the stage ends.
        max_failed: largest share of copies that the candidate may fail to answer.
        rules: guardrails whose share of bad answers is compared.
        judge: options of a judge of different answers; None: no judge.
    """

    share: _Share = 1.0
    copies: int = Field(default=200, ge=1)
    max_failed: float = Field(default=0.05, ge=0.0, le=1.0)
    rules: tuple[str, ...] = RULES
    judge: dict[str, Any] | None = None


class LoopConfig(OptionRecord):
    """The options of a loop.

    Attributes:
        target: the program, ``module:function``.
        store: the store with the traces and the table of deployments.
        key_file: key of a store that is a server's URL.
        agent: the agent whose policy is improved.
        base: the model of the server that loads the adapter or gets the prompt; None: the method needs none.
        stable: the model that answers the agent today; needed only before its first deployment.
        approval: whether a person must approve a promotion.
        select: options of the selection.
        train: ``method``, the learning method (default: ``train``), and its options.
        evaluate: options of the evaluation.
        shadow: options of the shadow.
        canary: options of the canary.
    """

    target: str
    store: str
    key_file: Path | None
    agent: str
    base: str | None = None
    stable: str | None = None
    approval: bool = True
    select: SelectTable = SelectTable()
    train: dict[str, Any]
    evaluate: EvaluateTable = EvaluateTable()
    shadow: ShadowTable = ShadowTable()
    canary: CanaryOptions = CanaryOptions()

    @property
    def shadow_rules(self) -> ShadowRules:
        """The rules by which the shadow's copies are compared."""
        return ShadowRules(rules=self.shadow.rules, judge=self.shadow.judge)

    @property
    def method(self) -> str:
        """The name of the learning method."""
        return str(self.train.get("method", "train"))

    @property
    def method_options(self) -> dict[str, Any]:
        """The options of the learning method."""
        return {name: value for name, value in self.train.items() if name != "method"}

    def with_method_options(self, options: Mapping[str, Any]) -> LoopConfig:
        """Return the same loop with other options of the learning method."""
        return self.model_copy(update={"train": {**options, "method": self.method}})

    def options(self) -> dict[str, Any]:
        """Return each option under its name in the file, without passwords, for comparison in a later call."""
        tables = {name: getattr(self, name) for name in ("select", "evaluate", "shadow", "canary")}
        values = {f"{table}.{name}": value for table, one in tables.items() for name, value in one.model_dump().items()}
        values |= {f"train.{name}": value for name, value in self.train.items()}
        values |= {name: getattr(self, name) for name in ("target", "agent", "base", "stable", "approval", "store")}
        return dict(without_passwords(values))
