"""The configuration of a loop: a TOML file with a table for each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field, ValidationError

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import merge, naming_file, parse_toml
from lightning_trainer.config.mistakes import refuse_unknown
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.deploy.options import CanaryOptions
from lightning_trainer.kits.deploy.shadow.comparison import RULES, ShadowRules
from lightning_trainer.options.permits import PermitOptions
from lightning_trainer.options.record import OptionRecord
from lightning_trainer.runner.target import JUDGE

# Options of `train` that the loop sets itself.
_SET_BY_LOOP: Final = ("target", "command", "env", "data", "val", "out", "resume", "store", "agents", "policies")
_OF_COMMAND: Final = ("target", "store", "key_file")
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
        base: the upstream of the server that loads the adapter.
        stable: the model that answers the agent today; needed only before its first deployment.
        approval: whether a person must approve a promotion.
        select: options of the selection.
        train: options of `train`.
        evaluate: options of the evaluation.
        shadow: options of the shadow.
        canary: options of the canary.
    """

    target: str
    store: str
    key_file: Path | None
    agent: str
    base: str
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

    def run(self, data: Path, out: Path, model: str | None) -> TrainConfig:
        """Return the training run of a round.

        Args:
            data: its tasks.
            out: its folder.
            model: the model that an earlier round promoted; None: the configured model.
        """
        own = {"target": self.target, "data": data, "out": out, "agents": (self.agent,)}
        adapter = {"policies": {self.agent: "lora"}}
        return merge(None, {**self.train, **own, **adapter, **({} if model is None else {"model": model})})

    def options(self) -> dict[str, Any]:
        """Return each option under its name in the file, without passwords, for comparison in a later call."""
        tables = {name: getattr(self, name) for name in ("select", "evaluate", "shadow", "canary")}
        values = {f"{table}.{name}": value for table, one in tables.items() for name, value in one.model_dump().items()}
        values |= {f"train.{name}": value for name, value in self.train.items()}
        values |= {name: getattr(self, name) for name in ("target", "agent", "base", "stable", "approval", "store")}
        return dict(without_passwords(values))


def read_loop(file: Path, target: str, store: str, key_file: Path | None) -> LoopConfig:
    """Read the configuration, and reject invalid options before anything is started.

    Raises:
        ConfigError: an option is invalid; the message says where and why.
    """
    values = parse_toml(file)
    with naming_file(file):
        refuse_unknown(values, {name: None for name in LoopConfig.model_fields if name not in _OF_COMMAND})
        config = _validate({**values, "target": target, "store": store, "key_file": key_file})
        _check(config)
    return config


def _validate(values: dict[str, Any]) -> LoopConfig:
    try:
        return LoopConfig(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            table = name == "train"
            raise ConfigError(
                f"{name} is missing. Write {'the table [train]' if table else f'{name} = ...'}."
            ) from None
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"unknown option {name!r}. See docs/how-to/loop.md.") from None
        message = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
        raise ConfigError(f"{name} = {problem['input']!r}: {message}.") from None


def _check(config: LoopConfig) -> None:
    if owned := [name for name in config.train if name in _SET_BY_LOOP]:
        raise ConfigError(f"train.{owned[0]}: the loop sets this option. Leave it out.")
    config.canary.rules  # noqa: B018 - or refuse
    config.shadow_rules  # noqa: B018 - or refuse
    train = config.run(Path("train.jsonl"), Path("run"), None)
    if train.checkpoint == "weights":
        raise ConfigError(
            "train.checkpoint: a run that saves only weights can't be resumed. Leave it out, or use newest."
        )
    if train.judge or train.reward == JUDGE:
        raise ConfigError(
            "train.reward: a judge ranks rollouts of one task against each other, so two models can't be compared."
            ' Give a reward that scores one rollout by itself: reward = "module:function".'
        )
