"""The configuration of `lightning-rl sft`: one frozen value, checked whole when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from lightning_spans.errors import ConfigError
from lightning_trainer import registry
from lightning_trainer.choices import Timeouts
from lightning_trainer.config.defaults import with_adapters
from lightning_trainer.config.mistakes import explain, refuse, refuse_unknown
from lightning_trainer.naming import parse_rules
from lightning_trainer.work import Work

OF_FILES: Final = frozenset({"data", "eval_every", "held_out", "loss", "origin", "patience"})  # and not of rounds


class SftConfig(BaseModel):
    """What to learn, from what, and how.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    # What is learned from.
    data: tuple[str, ...] = ()
    """Files of conversations (.jsonl, .json, .parquet; of `export`, or any data set with messages), and stores."""
    val: Path | None = None
    """Held-out file, instead of a share of the data."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks that is held out to tell when to stop; 0 holds out none."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens; a longer one is left out and counted. The model's own limit by default."""
    min_reward: float | None = None
    """Least reward of a line, where lines have rewards."""
    best: int | None = Field(default=None, ge=1)
    """Of each group and agent, the attempts that earned most (stores)."""
    origin: str | None = None
    """Only what was recorded for this: training, live, or a label (stores)."""

    # What is trained.
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents to train. With data that names no agent: the one whose words these are."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Adapters of agents over one frozen model, as in train: AGENT=lora, AGENT=lora:NAME, with commas between."""
    model: str
    """The model to start from: a folder, a run or checkpoint, a hub id, or smollm2-135m."""
    backend: str = "torch"
    """What learns: `torch`."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend by name, such as micro_batch_tokens of torch."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or `hermes` for ours, which knows tools."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters; 0 trains all weights. 16 with policies."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapters; twice the rank by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights that go forward; auto takes the model's own."""
    device: str = "auto"
    """Where it learns: auto, cpu, cuda, cuda:1, ..."""

    # How it learns.
    loss: Literal["likelihood", "dpo"] = "likelihood"
    """`likelihood` of what was said, or `dpo`: of two answers to one prompt, the better more than the worse."""
    beta: float | None = Field(default=None, gt=0)
    """Weight of the divergence from the starting model in dpo; 0.1 by default."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data. 2 when no steps are given either."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, instead of epochs."""
    batch_size: int = Field(default=16, ge=1)
    """Conversations in a step."""
    group_by_prefix: int = Field(default=1, ge=1)
    """Conversations that are drawn for a step together, chosen for what they have in common at their start, which goes
    forward once: 4 to 8 where many share a long prompt, such as a database's schema. 1 draws each on its own."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Highest step size of AdamW: 5e-5 by default, 2e-4 with LoRA; a tenth of it with dpo. It rises over the first
    tenth of the steps, at most 20, and falls to a tenth at the end."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between two looks at the held-out loss; by default four in an epoch, and at least every 50."""
    patience: int = Field(default=3, ge=1)
    """Looks without a lower held-out loss after which it stops. The weights of the lowest are kept."""
    seed: int = Field(default=0, ge=0)
    """Order of the data and initialisation follow from it. What is held out follows from the data alone."""

    # What is kept.
    out: Path | None = None
    """The run's folder; runs/DATE by default."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, handler: ModelWrapValidatorHandler[SftConfig]) -> SftConfig:
        """Turn what pydantic says into one error that says what to do."""
        if isinstance(values, Mapping):
            refuse_unknown(values, cls.model_fields)
            pairs = values.get("loss") == "dpo"
            values = with_adapters(values, learning_rate=2e-5 if pairs else 2e-4)
            if pairs and values.get("learning_rate") is None:
                values["learning_rate"] = 5e-6
        try:
            config = handler(values)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None
        registry.check("backend", config.backend)
        registry.check("tool format", config.backend_options.get("tool_format"))
        refuse(
            {
                "steps and epochs are two lengths. Give one of them.": None not in (config.steps, config.epochs),
                "beta is of loss = dpo. Set it, or leave beta out.": config.loss != "dpo" and config.beta is not None,
                "best is of conversations: pairs are of the best and the worst. Leave it out.": (
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
        """Return the learner's options, but for those that follow from the data."""
        from lightning_trainer.policies import parse

        names = (
            "chat_template", "device", "dtype", "learning_rate", "lora_alpha", "lora_rank", "max_grad_norm", "seed",
            "weight_decay",
        )  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        own = parse(self.policies)
        if own.adapters:
            options |= {"adapters": own.adapters, "fixed": tuple(sorted(own.fixed))}
        refuse(
            {
                f"backend_options: {name} is an option of its own. Write it outside backend_options.": True
                for name in self.backend_options.keys() & options.keys()
            }
        )
        return {**options, **self.backend_options}


class RoundsConfig(SftConfig):
    """What to sample and learn, in rounds. Of `SftConfig`, what is about files and their held-out loss is not used.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    rounds: int = Field(ge=1)
    """Rejection sampling: so many times TARGET runs on the tasks of --data with the current weights, and what earned
    most of each group is learned. val then names held-out tasks."""
    target: str | None = None
    """The agent: `module:function`."""
    command: str | None = None
    """The agent as a command, instead of TARGET (rounds)."""
    tasks: Path
    """Tasks to sample on."""
    reward: str | None = None
    """Reward function `module:function`, called as score(task, result), or `judge` (rounds)."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """The judge by option: endpoint, model, rubric, and others (rounds)."""
    samples: int = Field(default=8, ge=2)
    """Executions of each task in a round (rounds)."""
    val_samples: int = Field(default=1, ge=1)
    """Executions of each held-out task, before and after each round (rounds)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature forced on the agents' calls (rounds)."""
    answer_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer whose request names no limit (rounds)."""
    workers: int | None = Field(default=None, ge=1)
    """Worker processes; one a core by default (rounds)."""
    concurrency: int = Field(default=16, ge=1)
    """Executions at once in each worker (rounds)."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one attempt, in seconds (rounds)."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries before an execution counts as failed (rounds)."""
    failed: Literal["exclude", "lowest"] | float = "lowest"
    """Reward of an execution whose program failed after a model had answered, as in train: 0, or the lowest of the
    round where that is less (lowest), this reward, or nothing (exclude) (rounds)."""
    timeouts: Timeouts = "count"
    """How executions count that were too slow after a model had answered, as in train: as failures (count), or not at
    all (exclude) (rounds)."""
    name_by: tuple[str, ...] = ()
    """Rule that names the agents of calls which no header names, as in train: [NAME=]WHERE[:REGEX] (rounds)."""
    workdir: str | None = None
    """Folder of which each attempt of a command works in a copy of its own, as in train (rounds)."""
    workdir_size: str = "2GiB"
    """Most that an attempt's copy of workdir may take (rounds)."""
    restore: tuple[str, ...] = ()
    """Globs of files in workdir that are put back as they were before reward_command (rounds)."""
    reward_command: str | None = None
    """Command that gives the reward, run where the agent worked once it has ended, as in train (rounds)."""
    reward_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of reward_command, in seconds; beyond it the reward is 0 (rounds)."""
    reward_from: str | None = None
    """Where a command writes its reward instead of its last line, `fd` or a file, as in train (rounds)."""
    reward_range: str = "0,1"
    """Least and greatest reward that a command may give, as LOW,HIGH, as in train (rounds)."""

    @model_validator(mode="after")
    def _whole(self) -> RoundsConfig:
        given = sorted(OF_FILES & self.model_fields_set)
        refuse(
            {
                f"{', '.join(given)}: of files and stores. Rounds learn from what they sample: leave it out.": bool(
                    given
                ),
                "Name the agent: a target module:function, or a command.": self.target is None and self.command is None,
                "target and command are two agents. Give one of them.": None not in (self.target, self.command),
            }
        )
        parse_rules(self.name_by)  # or refuse
        self.work.check(command=self.command, reward=self.reward)
        return self

    @property
    def work(self) -> Work:
        """Where a command works, and what gives its reward."""
        return Work.of(dict(self))

    @property
    def kept(self) -> int:
        """Attempts of each group and agent that are learned."""
        return self.best or 1
