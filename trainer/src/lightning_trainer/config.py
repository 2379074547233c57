"""The configuration of a training run: one frozen value, checked whole when it is made.

`TrainConfig` is the one home of every option: the command line makes its flags from these fields, and a TOML file has
the same names as keys. Paths are relative to the current folder, in a file too.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from lightning_spans.errors import ConfigError
from lightning_trainer import policies
from lightning_trainer.recipes import Aggregation, KlEstimator, recipe_of


class TrainConfig(BaseModel):
    """What to train, on what, and how.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or contradicts another one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    # What runs, and on what.
    target: str | None = None
    """The agent: `module:function`, called as run(task), imported with the current folder on the path."""
    command: str | None = None
    """The agent as a command, for one in another language: the task comes as JSON on stdin and in LIGHTNING_TASK."""
    reward: str | None = None
    """Reward function `module:function`, called as score(task, result). Without it, the agent returns the reward."""
    data: Path
    """Training tasks: a JSON Lines, JSON or CSV file."""
    val: Path | None = None
    """Held-out tasks, run before and after training."""

    # What is trained.
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents to train. All agents that have a name, by default."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Adapters of agents over one frozen model, written AGENT=lora (its own), AGENT=lora:NAME (shared by those that
    name it), AGENT=fixed (that of the checkpoint given as model, not trained) or AGENT=base (the model without one),
    with commas between. Agents to train that have none share one."""
    model: str
    """The policy to start from: a local model folder, a hub id, or a name that the backend knows."""
    backend: str = "torch"
    """What generates and updates: `torch` (embedded), or one that a plugin registers."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend by name, such as slots or micro_batch_tokens of torch."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or `hermes` for ours, which knows tools."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters; 0 trains all weights. 16 with policies."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapters; twice the rank by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights that generate; auto takes the model's own."""
    device: str = "auto"
    """Where the backend works: auto, cpu, cuda, cuda:1, ... With verl: cpu, else its GPUs."""
    gpus: int = Field(default=1, ge=1)
    """Accelerators of each node (verl backend)."""
    nodes: int = Field(default=1, ge=1)
    """Machines of the Ray cluster (verl backend)."""
    staleness: int = Field(default=0, ge=0)
    """Steps by which the weights that sampled a rollout may be older than those that learn from it (verl backend); 0
    collects and learns in turn, more does both at once and corrects for it by truncated importance sampling."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """Any of verl's own options, nested or dotted, passed on as they are (verl backend)."""

    # How long.
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, one for each batch."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the tasks, instead of steps. 1 when neither is given."""
    until: float | None = None
    """Stop early once the training reward has reached this in two steps running."""
    batch_size: int = Field(default=8, ge=1)
    """Tasks in a step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task in a step; their returns are compared with each other. 1 is for ppo and reinforce++."""

    # How it learns.
    algorithm: str = "grpo"
    """`grpo`, `dr-grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`, `reinforce++-baseline`, `ppo`, or one that a
    plugin registers. Each sets the defaults that its paper has."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Step size of AdamW: 1e-5 by default, 1e-4 with LoRA."""
    credit: str = "identical"
    """How an attempt's rewards are shared out over its calls: identical, discounted, last, per-agent, turn, gigpo, or
    one that a plugin registers."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount from one turn to the one before it, for credit = discounted (0.9 by default), turn (1), gigpo (0.95)."""
    credit_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the credit by name, such as omega and anchor of gigpo."""
    rewards: dict[str, Any] = Field(default_factory=dict)
    """Automatic rewards by the name of their rule, each with its weight, such as tool_status = 0.1, or a table of its
    weight and options. None by default."""
    normalise_std: bool = True
    """Divide advantages by the deviation of their group."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to that deviation, so that nearly equal returns do not explode."""
    loss_aggregation: Aggregation = "token-mean"
    """Every token of the batch weighs the same (token-mean), every response (sequence-mean), every row (row-mean),
    every rollout (rollout-mean), or each token one response's share (sequence-sum)."""
    clip_low: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped below 1 minus this; 1 or more is no bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """The probability ratio is clipped above 1 plus this."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the starting policy; 0 keeps no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence is taken off: in the loss of each token, or in the reward of each call."""
    kl_estimator: KlEstimator = "k3"
    """How it is estimated; a + takes the gradient of k2. low_var is another name of k3."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy, which is added to what is to be made large."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Decay of generalised advantage estimation (ppo); 1 by default, which trusts the value head least."""
    value_learning_rate: float | None = Field(default=None, gt=0)
    """Step size of the value head (ppo); 1e-3 by default."""
    value_clip: float | None = Field(default=None, gt=0)
    """How far a value may move in an update (ppo); as far as it likes by default."""
    resample: int = Field(default=0, ge=0)
    """Rounds in which groups whose rollouts all earned the same are replaced by groups of other tasks, in each step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    failed: Literal["exclude"] | float = "exclude"
    """What a rollout that never succeeded counts as: nothing (exclude), or this reward."""

    # How it samples.
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature forced on the trained agents' calls; by default what the agent asks for, else 1."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer, where the agent's request names no limit."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and answer together; the model's own limit by default."""
    seed: int = Field(default=0, ge=0)
    """Order of the tasks, sampling and initialisation follow from it."""

    # How the agent runs.
    workers: int | None = Field(default=None, ge=0)
    """Worker processes; as many as there are cores, at most what a batch can use, by default. With backend = "verl", 0
    leaves the rollouts to runners on other machines."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once in each worker."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one attempt, in seconds."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries before a rollout counts as failed."""

    # What is kept.
    out: Path | None = None
    """The run's folder; runs/DATE by default."""
    resume: Path | None = None
    """Go on from this run folder or checkpoint, exactly where it stopped."""
    val_every: int | None = Field(default=None, ge=1)
    """Validate every so many steps, besides before and after."""
    val_samples: int = Field(default=1, ge=1)
    """Rollouts of each held-out task, sampled as in training."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; there is always one at the end."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept, newest first."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that are told the metrics, with commas between: mlflow, wandb. TensorBoard always is."""
    store: str | None = None
    """Store URL for traces and rollouts; SQLite in the run's folder by default."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the run's own server on 127.0.0.1; 0 takes a free one."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, handler: ModelWrapValidatorHandler[TrainConfig]) -> TrainConfig:
        """Turn what pydantic says into one error that says what to do."""
        if isinstance(values, Mapping):
            refuse_unknown(values, cls.model_fields)
            values = _with_defaults(values)
        try:
            config = handler(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        _cross_check(config)
        return config

    def step_count(self, task_count: int) -> int:
        """Number of steps of the whole run over this many tasks."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or 1.0) * task_count / self.batch_size))

    @property
    def learns_from_flat_groups(self) -> bool:
        """Whether there is something to learn where all rewards of a group are equal."""
        divergence = self.kl_coef > 0 and self.kl_in == "loss"
        return divergence or self.entropy_coef > 0 or recipe_of(self.algorithm).critic

    def worker_count(self) -> int:
        """Worker processes to start: as asked, else one a core, and no more than a batch fills."""
        full = math.ceil(self.batch_size * self.group_size / self.concurrency)
        return max(1, min(cores(), full)) if self.workers is None else self.workers


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse keys that are no options.

    Raises:
        ConfigError: names the first unknown key and the nearest known one.
    """
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known options: {', '.join(sorted(known))}."
            raise ConfigError(f"unknown option {key!r}. {hint}")


def read_toml(path: Path) -> dict[str, Any]:
    """Read options from a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}. Give the path of a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    try:
        refuse_unknown(values, TrainConfig.model_fields)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from None
    return values


def merge(file: Path | None, flags: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> TrainConfig:
    """Make the configuration from a TOML file and command-line flags; a flag goes before the file's key.

    Args:
        file: TOML file; None for none.
        flags: options by field name; those that are None were not given.
        base: options that both go before.

    Raises:
        ConfigError: see `TrainConfig`.
    """
    values = {**(base or {}), **(read_toml(file) if file is not None else {})}
    given = {name: value for name, value in flags.items() if value is not None}
    for one, other in (("steps", "epochs"), ("epochs", "steps"), ("target", "command"), ("command", "target")):
        if one in given and other not in given:
            values.pop(other, None)  # the flag replaces its alternative of the file as well
    return TrainConfig(**{**values, **given})


def to_json(config: TrainConfig) -> str:
    """Give the configuration as JSON text, as kept in the run's folder."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults that depend on other options, and take lists of names as one text with commas too."""
    filled = dict(values)
    if filled.get("policies"):
        if isinstance(filled["policies"], (str, tuple)):
            filled["policies"] = policies.read_text(filled["policies"])
        filled["lora_rank"] = filled.get("lora_rank") or policies.DEFAULT_RANK
    if filled.get("lora_rank") and filled.get("learning_rate") is None:
        filled["learning_rate"] = 1e-4  # adapters start at zero and take about ten times the step of full weights
    if isinstance(filled.get("algorithm"), str):
        for name, value in recipe_of(filled["algorithm"]).options.items():
            filled[name] = value if filled.get(name) is None else filled[name]
    for name in ("agents", "trackers"):
        if isinstance(filled.get(name), str):
            filled[name] = tuple(part.strip() for part in filled[name].split(",") if part.strip())
    chosen = filled.get("policies")
    if isinstance(chosen, Mapping) and chosen and all(isinstance(value, str) for value in chosen.values()):
        filled["policies"], filled["agents"] = policies.complete(chosen, filled.get("agents"))
    return filled


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        name = str(problem["loc"][0]) if problem["loc"] else "configuration"
        if problem["type"] == "missing":
            lines.append(f"{name} is missing. Give --{name.replace('_', '-')}, or {name} = ... in the config file.")
            continue
        lines.append(f"{name} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}.")
    return "\n".join(dict.fromkeys(lines))


def _cross_check(config: TrainConfig) -> None:
    """Refuse options that contradict each other; each message says which one to change."""
    recipe = recipe_of(config.algorithm)
    problems = {
        f"group_size = 1 leaves nothing to compare for algorithm = {config.algorithm}. Use 2 or more.": (
            config.group_size == 1 and recipe.grouped
        ),
        f"normalise_std has no effect with algorithm = {config.algorithm}. Leave it out.": config.normalise_std
        and (recipe.compare != "group" or recipe.whiten),
        "gae_lambda, value_learning_rate and value_clip are options of algorithm = ppo. Leave them out.": (
            not recipe.critic and (config.gae_lambda, config.value_learning_rate, config.value_clip) != (None,) * 3
        ),
        f"resample looks for rewards that differ within a group, which algorithm = {config.algorithm} does not need. "
        "Leave it out.": bool(config.resample) and not recipe.grouped,
        "Name the agent: a target module:function, or a command.": config.target is None and config.command is None,
        "target and command are two agents. Give one of them.": None not in (config.target, config.command),
        "steps and epochs are two lengths. Give one of them.": None not in (config.steps, config.epochs),
        "agents is empty. Name the agents to train, or leave it out to train all.": config.agents == (),
        "lora_alpha needs lora_rank. Give a rank, or leave alpha out.": (
            config.lora_alpha is not None and not config.lora_rank
        ),
        "gamma has no effect with credit = identical. Set credit to discounted, or leave gamma out.": (
            config.gamma is not None and config.credit == "identical"
        ),
        "val_every needs val. Name a file of held-out tasks.": config.val_every is not None and config.val is None,
        "verl trains one policy for all agents. Leave policies out, or train on backend = torch.": bool(config.policies)
        and config.backend == "verl",
        'workers = 0 leaves the rollouts to runners elsewhere. Only backend = "verl" has a key for them.': (
            config.workers == 0 and config.backend != "verl"
        ),
        'gpus, nodes, staleness and verl are options of backend = "verl". Set it, or leave them out.': config.backend
        == "torch"
        and (config.gpus, config.nodes, config.staleness, dict(config.verl)) != (1, 1, 0, {}),
    }
    for message, wrong in problems.items():
        if wrong:
            raise ConfigError(message)
