"""The options of a training run. `TrainConfig` adds the checks of one against another.

This is the one home of every option: the command line makes its flags from these fields, and a TOML file has the same
names as keys. Paths are relative to the current folder, in a file too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lightning_spans.schema.agents import is_glob
from lightning_trainer.choices import Aggregation, KlEstimator, Schedule, Timeouts
from lightning_trainer.config.chosen import chosen_algorithm, looks_at_forks
from lightning_trainer.config.workers import worker_count
from lightning_trainer.work import Work


class TrainFields(BaseModel):
    """The options, each with its type, default and help. Make a `TrainConfig`, which checks them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    # What runs, and on what.
    target: str | None = None
    """The agent: `module:function`, called as run(task), imported with the current folder on the path."""
    command: str | None = None
    """The agent as a command, for one in another language: the task comes as JSON on stdin and in LIGHTNING_TASK."""
    reward: str | None = None
    """Reward function `module:function`, called as score(task, result), or `judge`, a model that compares the rollouts
    of a group (see judge). Without it, the agent returns the reward."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """The judge by option: endpoint, model, rubric, weight (1), and others. With reward = judge it gives the reward;
    with another reward its own, times the weight, is mixed in (torch backend)."""
    data: Path
    """Training tasks: a JSON Lines, JSON, CSV or Parquet file, or a folder of a Hugging Face data set."""
    val: Path | None = None
    """Held-out tasks, run before and after training."""
    env: str | None = None
    """Instead of target and data: an environment of verifiers by its module's name, or an OpenEnv server by its URL. It
    gives the tasks, the loop and the reward."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment by name."""
    env_tasks: int | None = Field(default=None, ge=1)
    """Take at most so many of its tasks; 200 by default."""
    env_held_out: int | None = Field(default=None, ge=1)
    """Hold so many others out, as val does."""

    # What is trained.
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents to train. All agents that have a name, by default."""
    name_by: tuple[str, ...] = ()
    """Rule that names the agents of calls which no header names, `[NAME=]WHERE[:REGEX]`: WHERE is `system` (the system
    prompt), `model` (the model asked for) or `header:FIELD`. The first that matches counts."""
    policies: dict[str, str] = Field(default_factory=dict)
    """Adapters of agents over one frozen model, written AGENT=lora (its own), AGENT=lora:NAME (shared by those that
    name it), AGENT=fixed (that of the checkpoint given as model, not trained) or AGENT=base (the model without one),
    with commas between. Agents to train that have none share one."""
    model: str
    """The policy to start from: a model folder, a run's folder or checkpoint, a hub id (owner/model or
    owner/model@revision), or smollm2-135m."""
    backend: str = "torch"
    """What generates and updates: `torch`, `verl`, or one that a plugin registers."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend by name, such as slots or micro_batch_tokens of torch."""
    engine: str | None = None
    """What samples: `embedded` (the learner's process), `vllm` (a process of its own, for adapters), or one that a
    plugin registers. By default vllm for adapters on CUDA where it is installed, otherwise embedded (torch)."""
    engine_python: Path | None = None
    """Python interpreter of the environment that vLLM is installed in; this one by default (torch)."""
    engine_url: str | None = None
    """Base URL of a vLLM server that is running, such as http://127.0.0.1:8000/v1, or several with commas between. It
    must be started as docs/how-to/gpu.md says (torch)."""
    engine_gpus: str | None = None
    """GPUs of vLLM, such as 1 or 1,2; the learner's by default (torch)."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of `vllm serve` by name, such as gpu_memory_utilization (torch)."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, or `hermes` for ours, which knows tools."""
    tool_format: str | None = None
    """Format in which the model writes tool calls, such as `hermes` or `deepseek-v3`, where its chat template does not
    show it; `none` where no agent has tools. By default that of the run that the model comes from, or the template is
    asked to write one."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters; 0 trains all weights. 16 with policies."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Scale of the adapters; twice the rank by default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights that generate; auto takes the model's own, but float32 on a processor that
    is slower at bfloat16, as measured when it is loaded (torch)."""
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
    """`grpo`, `dr-grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`, `reinforce++-baseline`, `ppo`, `distil`,
    or one that a plugin registers. Each sets the defaults that its paper has."""
    teacher: str | None = None
    """Of algorithm = distil: who says how likely each sampled token is. A model folder or name, or MODEL=URL of a vLLM
    server, with the policy's own vocabulary; or `self`, the policy once it has read what came of a call, which goes
    with every algorithm (torch)."""
    teacher_options: dict[str, Any] = Field(default_factory=dict)
    """Of teacher = self, by name: told, top_k, divergence, weight, hint, max_chars."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Step size of AdamW: 1e-5 by default, 1e-4 with LoRA."""
    credit: str = "identical"
    """How an attempt's rewards are shared out over its calls: identical, discounted, last, per-agent, turn, gigpo,
    counterfactual, or one that a plugin registers."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount from one turn to the one before it, for credit = discounted (0.9 by default), turn (1), gigpo (0.95)."""
    credit_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the credit by name, such as omega and anchor of gigpo."""
    forks: int | None = Field(default=None, ge=1)
    """Continuations in a step that begin at a call of one of its rollouts, for credit = counterfactual; by default as
    many as alternatives for each rollout. With orders, runs in which the frozen base stands in for agents; by default
    as many as orders ask for."""
    alternatives: int = Field(default=3, ge=1)
    """Continuations of each call that is drawn again."""
    orders: int = Field(default=0, ge=0)
    """Log what each agent adds to its team (shapley/AGENT), measured in so many orders in which the agents of a rollout
    join, each next to its reverse. Even; 0 measures nothing. Nothing is trained on the runs that this takes."""
    fork_at: Literal["agents", "evenly", "entropy", "disagreement"] = "agents"
    """Which calls are drawn again: as many of each agent to be trained, any, those whose answers held most surprise, or
    those of agents whose alternatives came to different things before."""
    fork_tools: dict[str, Literal["replay", "run", "refuse"]] = Field(default_factory=dict)
    """What becomes of tools in a fork, by their names or globs: replay gives what they gave in the record, where that
    was asked then (all tools, by default), run runs them again, refuse never runs them."""
    rewards: dict[str, Any] = Field(default_factory=dict)
    """Automatic rewards by the name of their rule, each with its weight, such as tool_status = 0.1, or a table of its
    weight and options. None by default."""
    normalise_std: bool = True
    """Divide advantages by the deviation of their group."""
    alone: Literal["skip", "batch"] = "skip"
    """An agent that called a model in one rollout of its group alone has nothing to be compared with there: its calls
    teach nothing (skip), or are compared with its calls in the whole batch (torch)."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to that deviation, so that nearly equal returns do not explode."""
    loss_aggregation: Aggregation = "token-mean"
    """Every token of the batch weighs the same (token-mean), every response (sequence-mean), every row (row-mean),
    every rollout (rollout-mean), or each token one response's share (sequence-sum)."""
    clip_low: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped below 1 minus this; 1 or more is no bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """The probability ratio is clipped above 1 plus this."""
    old_logprobs: Literal["engine", "recompute"] | None = None
    """What ratios compare with: the log-probabilities that the engine recorded, or the trainer's own before the update,
    which costs a forward pass (torch). recompute with gspo, else engine; verl always recomputes."""
    update_epochs: int = Field(default=1, ge=1)
    """Passes over each batch (torch). With one pass in one piece and recomputed log-probabilities all ratios are 1, and
    no clip does anything."""
    minibatches: int = Field(default=1, ge=1)
    """Pieces into which a batch is cut, each with an optimiser step of its own (torch)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises to its value."""
    lr_schedule: Schedule = "constant"
    """How the learning rate goes on from there, to the end of the run: constant, linear (torch), or cosine."""
    min_lr_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Where a schedule that falls ends, as a share of the learning rate."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: tokens weigh the trainer's probability over the engine's, at most this. On
    torch with old_logprobs = recompute."""
    importance_mask: float | None = Field(default=None, gt=1)
    """Tokens whose probability differs between trainer and engine by more than this factor are left out of the
    loss. On torch with old_logprobs = recompute."""
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
    failed: Literal["exclude", "lowest"] | float = "lowest"
    """Reward of a rollout whose program failed after a model had answered, which is the policy's doing: 0, or the
    lowest reward of the batch where that is less (lowest), this reward, or nothing (exclude), which teaches policies to
    crash. Lost workers and servers that do not answer are left out and tried again."""
    timeouts: Timeouts = "count"
    """How rollouts count that reach `timeout_s`, or in which the program gives up on a model call, after a model has
    answered: as failures (count), or not at all (exclude). Exclude them only where slow infrastructure is to blame,
    because it teaches policies to hang and to write answers that take too long."""

    # How it samples.
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature forced on the trained agents' calls; by default what the agent asks for, else 1."""
    sampling: Literal["plain", "asked"] = "plain"
    """`plain` draws from the policy itself: the top_p, top_k, min_p and penalties of the agent's requests are left out
    and recorded. With `asked` they hold, and what they changed is left out of training."""
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

    workdir: str | None = None
    """Folder of which each attempt of a command works in a copy of its own, a clone where it is a git repository. Add
    `@REVISION` to begin with another commit; `{field}` stands for a task's field. What is changed is kept as a span."""
    workdir_size: str = "2GiB"
    """Most that an attempt's copy of workdir may take; an attempt that goes beyond it fails."""
    restore: tuple[str, ...] = ()
    """Globs of files in workdir that are put back as they were before reward_command, such as `tests/**`."""
    reward_command: str | None = None
    """Command that gives the reward, run where the agent worked once it has ended: 0 unless its exit status is 0; then
    x if its last line is {"reward": x}, otherwise 1."""
    reward_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of reward_command, in seconds; beyond it the reward is 0."""
    reward_from: str | None = None
    """Where a command writes its reward instead of its last line, so that no printed answer passes for one: `fd`, a
    descriptor whose number is in LIGHTNING_REWARD_FD, or a file of the folder where it works."""
    reward_range: str = "0,1"
    """Least and greatest reward that a command may give, as LOW,HIGH. An attempt with any other reward has failed."""

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
    """Steps between checkpoints; there is always one at the end, and one after 15 minutes without (torch)."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept, newest first."""
    checkpoint: Literal["newest", "full", "weights"] = "newest"
    """What checkpoints hold: the weights, and what going on exactly needs (masters and moments, six times as much in
    bfloat16) in the `newest` one, in each (full), or in none (weights), from which no run goes on (torch)."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that are told the metrics, with commas between: mlflow, wandb. TensorBoard always is."""
    store: str | None = None
    """Store URL for traces and rollouts; SQLite in the run's folder by default."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the run's own server on 127.0.0.1; 0 takes a free one."""

    def step_count(self, task_count: int) -> int:
        """Number of steps of the whole run over this many tasks."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or 1.0) * task_count / self.batch_size))

    @property
    def learns_from_flat_groups(self) -> bool:
        """Whether there is something to learn where all rewards of a group are equal."""
        divergence = self.kl_coef > 0 and self.kl_in == "loss"
        return divergence or self.entropy_coef > 0 or chosen_algorithm(self.algorithm).critic

    @property
    def forked(self) -> bool:
        """Whether calls of a step's rollouts are drawn again."""
        return looks_at_forks(self.credit)

    @property
    def fork_count(self) -> int:
        """Most continuations in a step that begin at a call."""
        if self.forks is not None:
            return self.forks
        each = self.coalitions if self.by_coalitions else self.alternatives
        return self.batch_size * self.group_size * each if self.forked or self.by_coalitions else 0

    @property
    def by_coalitions(self) -> bool:
        """Whether rollouts run again with the frozen base in the place of some agents."""
        return self.orders > 0

    @property
    def coalitions(self) -> int:
        """Most runs that the orders of one rollout come to; 0 where a glob leaves open who is in the team."""
        team = len(self.agents or ())
        return 0 if any(map(is_glob, self.agents or ())) else min(1 + self.orders * (team - 1), 2**team - 1)

    @property
    def work(self) -> Work:
        """Where a command works, and what gives its reward."""
        return Work.of(dict(self))

    def worker_count(self) -> int:
        """Worker processes to start: as asked, else one a core, and no more than a batch fills."""
        return worker_count(self.workers, self.batch_size * self.group_size, self.concurrency)
