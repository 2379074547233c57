"""The configuration of `lightning-rl sft`: one frozen value, fully checked when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from lightning_trainer import registry
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.checks import of_adapters
from lightning_trainer.config.chosen import backend_defaults
from lightning_trainer.config.defaults import of_backend, with_adapters
from lightning_trainer.config.mistakes import refuse, refuse_unknown
from lightning_trainer.naming import parse_rules
from lightning_trainer.options.files import RunFolderOptions
from lightning_trainer.options.learning import AdapterOptions, LengthOptions, OptimizerOptions
from lightning_trainer.options.limits import FailureOptions, LimitOptions
from lightning_trainer.options.model import MessageOptions, PrecisionOptions
from lightning_trainer.options.permits import PermitOptions
from lightning_trainer.options.policies import NameRuleOptions, PolicyOptions, StartOptions
from lightning_trainer.options.program import AgentOptions
from lightning_trainer.options.record import OptionRecord
from lightning_trainer.options.sampling import SeedOptions
from lightning_trainer.options.selection import SelectionOptions
from lightning_trainer.options.tasks import ColumnOptions, HeldOutOptions
from lightning_trainer.options.work import WorkOptions

OF_FILES: Final = frozenset(
    {"data", "eval_every", "held_out", "loss", "origin", "patience", *PermitOptions.model_fields}
)  # not options of rounds

_MOVED: Final = ("base_bits", "tool_format")  # among the options of the backend in earlier versions
_RENAMED: Final = (
    "max_tokens limits an answer in all commands, so the limit of a conversation in sft is now max_length. Write"
    " max_length, or answer_tokens for the answers of rounds."
)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that an earlier version began, under their current names and in their places."""
    renamed = {"max_length" if name == "max_tokens" else name: value for name, value in values.items()}
    own = renamed.get("backend_options") or {}
    moved = {name: own[name] for name in _MOVED if name in own}
    if not renamed.get("lora_rank"):  # not the rank of a backend that trains adapters only
        renamed |= {n: rank for n, rank in backend_defaults(str(values.get("backend"))).items() if n == "lora_rank"}
    return {**renamed, **moved, "backend_options": {n: value for n, value in own.items() if n not in moved}}


class ConversationFields(OptionRecord):
    """What is learned from."""

    data: tuple[str, ...] = ()
    """Files of conversations (.jsonl, .json, .parquet; from `export`, or any data set with messages), and stores."""
    val: Path | None = None
    """Held-out file, instead of a share of the data."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks held out for early stopping; 0 holds out none."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of a conversation; longer ones are left out and counted. Default: the model's own limit."""


class SftConfig(
    PermitOptions,
    RunFolderOptions,
    SeedOptions,
    OptimizerOptions,
    LengthOptions,
    AdapterOptions,
    PrecisionOptions,
    MessageOptions,
    StartOptions,
    PolicyOptions,
    SelectionOptions,
    ConversationFields,
    CheckedRecord,
):
    """Options of `lightning-rl sft`.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    loss: Literal["likelihood", "dpo"] = "likelihood"
    """`likelihood` (supervised fine-tuning), or `dpo` (direct preference optimisation on pairs of answers to one
    prompt)."""
    beta: float | None = Field(default=None, gt=0)
    """KL coefficient of dpo. Default: 0.1."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations per step."""
    group_by_prefix: int = Field(default=1, ge=1)
    """Number of conversations with a common beginning that are sampled together, so that the beginning is computed
    once: 4 to 8 if many share a long prompt, such as a database schema. 1 samples each independently."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Maximum learning rate of AdamW. With LoRA, the default is 2e-4; with dpo, a tenth of these. Warmup takes the
    first tenth of the steps, at most 20; then the rate decays to a tenth."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between measurements of the held-out loss. Default: four per epoch, and at least every 50 steps."""
    patience: int = Field(default=3, ge=1)
    """Early stopping: measurements without a lower held-out loss after which training stops. The weights with the
    lowest loss are kept."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_values(cls, values: Any, handler: ModelWrapValidatorHandler[SftConfig]) -> SftConfig:
        """Set defaults that depend on other options, and check one option against another."""
        if isinstance(values, Mapping):
            refuse({_RENAMED: "max_tokens" in values})
            refuse_unknown(values, cls.model_fields)
            pairs = values.get("loss") == "dpo"
            more = {name: value for name, value in of_backend(values).items() if name in cls.model_fields}
            values = with_adapters({**values, **more}, learning_rate=2e-5 if pairs else 2e-4)
            if pairs and values.get("learning_rate") is None:
                values["learning_rate"] = 5e-6
        config = handler(values)
        registry.check("backend", config.backend)
        registry.check("tool format", config.tool_format)
        refuse(
            {
                "steps and epochs both set the length. Give one of them.": None not in (config.steps, config.epochs),
                "beta needs loss = dpo. Set it, or leave beta out.": config.loss != "dpo" and config.beta is not None,
                "best applies to conversations: pairs already consist of the best and the worst. Leave it out.": (
                    config.loss == "dpo" and config.best is not None
                ),
                "agents is empty. Name the agents to train, or leave it out.": config.agents == (),
                **of_adapters(config, config.backend),
            }
        )
        return config

    def learner_options(self) -> dict[str, Any]:
        """Return the learner's options, except those that follow from the data."""
        from lightning_trainer.policies import parse

        names = (
            "base_bits", "chat_template", "device", "dtype", "learning_rate", "lora_alpha", "lora_rank",
            "max_grad_norm", "seed", "system_messages", "tool_format", "weight_decay",
        )  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        own = parse(self.policies)
        if own.adapters:
            options |= {"adapters": own.adapters, "fixed": tuple(sorted(own.fixed))}
        refuse(
            {
                f"backend_options: {name} is a separate option. Write it outside backend_options.": True
                for name in self.backend_options.keys() & options.keys()
            }
        )
        return {**options, **self.backend_options}


class RoundFields(HeldOutOptions, ColumnOptions, NameRuleOptions, SftConfig):
    """Options that only rounds have."""

    rounds: int = Field(ge=1)
    """Rejection sampling: number of rounds. In each, TARGET runs on the tasks of --data with the current weights, and
    the best rollouts of each group are learned. val then names held-out tasks."""
    tasks: Path
    """Tasks to sample on."""
    samples: int = Field(default=8, ge=2)
    """Rollouts per task and round."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, set on all calls of the agents."""
    answer_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer if the request sets no limit."""


class RoundsConfig(WorkOptions, LimitOptions, FailureOptions, AgentOptions, RoundFields):
    """Options of rejection sampling. Those of `SftConfig` about files and their held-out loss are not used.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    @model_validator(mode="after")
    def _whole(self) -> RoundsConfig:
        given = sorted(OF_FILES & self.model_fields_set)
        refuse(
            {
                f"{', '.join(given)}: for files and stores only, because rounds learn from their own samples."
                " Leave it out.": bool(given),
                "Name the agent: a target module:function, or a command.": self.target is None and self.command is None,
                "target and command both name an agent. Give one of them.": None not in (self.target, self.command),
                f"temperature = {self.temperature}: a Tinker server gives log-probabilities at temperature 1 only. Set"
                " it to 1.": self.backend == "tinker" and self.temperature != 1.0,
                "workers = 0: rounds sample on this machine. Give 1 or more, or leave workers out.": self.workers == 0,
            }
        )
        parse_rules(self.name_by)  # raises if a rule is invalid
        self.work.check(command=self.command, reward=self.reward)
        return self

    @property
    def declared(self) -> tuple[float, float] | None:
        """The range of all rewards, if it is known."""
        return self.work.declared(command=self.command, reward=self.reward)

    @property
    def kept(self) -> int:
        """Number of attempts of each group and agent that are learned."""
        return self.best or 1
