"""The configuration of `lightning-rl sft`: one frozen value, fully checked when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from lightning_trainer import registry
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.defaults import with_adapters
from lightning_trainer.config.mistakes import refuse, refuse_unknown
from lightning_trainer.naming import parse_rules
from lightning_trainer.options.limits import FailureOptions, LimitOptions
from lightning_trainer.options.permits import PermitOptions
from lightning_trainer.options.program import AgentOptions
from lightning_trainer.options.work import WorkOptions

OF_FILES: Final = frozenset(
    {"data", "eval_every", "held_out", "loss", "origin", "patience", *PermitOptions.model_fields}
)  # not options of rounds

_RENAMED: Final = (
    "max_tokens limits an answer in all commands, so the limit of a conversation in sft is now max_length. Write"
    " max_length, or answer_tokens for the answers of rounds."
)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that an earlier version began, under their current names."""
    return {"max_length" if name == "max_tokens" else name: value for name, value in values.items()}


class SftConfig(PermitOptions, CheckedRecord):
    """Options of `lightning-rl sft`.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    # What is learned from.
    data: tuple[str, ...] = ()
    """Files of conversations (.jsonl, .json, .parquet; from `export`, or any data set with messages), and stores."""
    val: Path | None = None
    """Held-out file, instead of a share of the data."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks held out for early stopping; 0 holds out none."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of a conversation; longer ones are left out and counted. Default: the model's own limit."""
    min_reward: float | None = None
    """Minimum reward of a line, for lines that have rewards."""
    best: int | None = Field(default=None, ge=1)
    """Use only the N attempts with the highest reward of each group and agent (stores)."""
    origin: str | None = None
    """Use only traces of this origin: training, live, or your own label (stores)."""

    # What is trained.
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents to train. If the data names no agent: the agent to which its rows belong."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Adapters of agents over one frozen model, as in train: AGENT=lora, AGENT=lora:NAME, separated by commas."""
    model: str
    """The model to start from: a folder, a run or checkpoint, a hub id, or smollm2-135m."""
    backend: str = "torch"
    """Backend that learns: `torch`."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend, such as micro_batch_tokens of torch."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or `hermes` for the built-in template, which supports
    tools."""
    system_messages: Literal["as-sent", "merge"] = "as-sent"
    """`merge` joins system and user messages that the chat template refuses otherwise, as in train."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters; 0 trains all weights. With policies, the default is 16."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """LoRA scale. Default: twice the rank."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights in the forward pass; auto uses the model's own."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:1, ..."""

    # How it learns.
    loss: Literal["likelihood", "dpo"] = "likelihood"
    """`likelihood` (supervised fine-tuning), or `dpo` (direct preference optimisation on pairs of answers to one
    prompt)."""
    beta: float | None = Field(default=None, gt=0)
    """KL coefficient of dpo. Default: 0.1."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data. Default: 2 if neither epochs nor steps is given."""
    steps: int | None = Field(default=None, ge=1)
    """Number of optimiser steps, instead of epochs."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations per step."""
    group_by_prefix: int = Field(default=1, ge=1)
    """Number of conversations with a common beginning that are sampled together, so that the beginning is computed
    once: 4 to 8 if many share a long prompt, such as a database schema. 1 samples each independently."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Maximum learning rate of AdamW. With LoRA, the default is 2e-4; with dpo, a tenth of these. Warmup takes the
    first tenth of the steps, at most 20; then the rate decays to a tenth."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between measurements of the held-out loss. Default: four per epoch, and at least every 50 steps."""
    patience: int = Field(default=3, ge=1)
    """Early stopping: measurements without a lower held-out loss after which training stops. The weights with the
    lowest loss are kept."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order and initialisation. What is held out depends only on the data."""

    # What is kept.
    out: Path | None = None
    """Folder of the run. Default: runs/DATE."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_values(cls, values: Any, handler: ModelWrapValidatorHandler[SftConfig]) -> SftConfig:
        """Set defaults that depend on other options, and check one option against another."""
        if isinstance(values, Mapping):
            refuse({_RENAMED: "max_tokens" in values})
            refuse_unknown(values, cls.model_fields)
            pairs = values.get("loss") == "dpo"
            values = with_adapters(values, learning_rate=2e-5 if pairs else 2e-4)
            if pairs and values.get("learning_rate") is None:
                values["learning_rate"] = 5e-6
        config = handler(values)
        registry.check("backend", config.backend)
        registry.check("tool format", config.backend_options.get("tool_format"))
        refuse(
            {
                "steps and epochs both set the length. Give one of them.": None not in (config.steps, config.epochs),
                "beta needs loss = dpo. Set it, or leave beta out.": config.loss != "dpo" and config.beta is not None,
                "best applies to conversations: pairs already consist of the best and the worst. Leave it out.": (
                    config.loss == "dpo" and config.best is not None
                ),
                "agents is empty. Name the agents to train, or leave it out.": config.agents == (),
                "lora_alpha needs lora_rank. Give a rank, or leave alpha out.": (
                    config.lora_alpha is not None and not config.lora_rank
                ),
            }
        )
        return config

    def learner_options(self) -> dict[str, Any]:
        """Return the learner's options, except those that follow from the data."""
        from lightning_trainer.policies import parse

        names = (
            "chat_template", "device", "dtype", "learning_rate", "lora_alpha", "lora_rank", "max_grad_norm", "seed",
            "system_messages", "weight_decay",
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


class RoundFields(SftConfig):
    """Options that only rounds have."""

    rounds: int = Field(ge=1)
    """Rejection sampling: number of rounds. In each, TARGET runs on the tasks of --data with the current weights, and
    the best rollouts of each group are learned. val then names held-out tasks."""
    tasks: Path
    """Tasks to sample on."""
    columns: tuple[str, ...] = ()
    """Columns of tasks and val to read. Default: all."""
    samples: int = Field(default=8, ge=2)
    """Rollouts per task and round."""
    val_samples: int = Field(default=1, ge=1)
    """Rollouts per held-out task, before and after each round."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, set on all calls of the agents."""
    answer_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer if the request sets no limit."""
    name_by: tuple[str, ...] = ()
    """Rule that names the agents of calls without an agent header, as in train: [NAME=]WHERE[:REGEX]."""


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
