"""The options of a training run. `TrainConfig` adds the checks of options against each other.

The command line makes its flags from these fields, and a TOML file has the same names as keys. Options that other
commands share are in `lightning_trainer.options`. Paths are relative to the current folder, also in a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lightning_spans.schema.agents import is_glob
from lightning_trainer.choices import Alone
from lightning_trainer.config.chosen import chosen_algorithm, looks_at_forks
from lightning_trainer.config.workers import worker_count
from lightning_trainer.options.environment import EnvironmentOptions
from lightning_trainer.options.files import PortOptions, ResumeOptions, RunFolderOptions, StoreOptions
from lightning_trainer.options.learning import (
    AdapterOptions,
    AlgorithmOptions,
    CreditOptions,
    GradientOptions,
    LengthOptions,
    LossOptions,
    RateOptions,
    steps_of_epochs,
)
from lightning_trainer.options.limits import FailureOptions, LimitOptions
from lightning_trainer.options.model import MessageOptions, PrecisionOptions
from lightning_trainer.options.policies import NameRuleOptions, PolicyOptions, StartOptions
from lightning_trainer.options.program import AgentOptions
from lightning_trainer.options.record import OptionRecord
from lightning_trainer.options.sampling import AnswerOptions, ContextOptions, SampleOptions, SeedOptions
from lightning_trainer.options.tasks import ColumnOptions, HeldOutOptions, TaskOptions
from lightning_trainer.options.work import WorkOptions


class DataFields(OptionRecord):
    """The held-out tasks."""

    val: Path | None = None
    """Held-out tasks, evaluated before and after training."""


class ModelFields(OptionRecord):
    """The backend and the engine."""

    tinker_url: str | None = None
    """URL of the Tinker server, such as http://127.0.0.1:8000. The key is read from TINKER_API_KEY (tinker)."""
    max_cost: float | None = Field(default=None, gt=0)
    """Maximum cost of the run in the currency of the price table: the run is saved and ends before a step that could
    exceed it (tinker)."""
    prices: Path | None = None
    """JSON file with token prices by model, which replaces the built-in table (tinker)."""
    engine: str | None = None
    """Engine that samples: `embedded` (in the learner's process), `vllm` (in a separate process), or one that a
    plugin registers. Default: vllm for adapters on CUDA if it is installed, otherwise embedded (torch)."""
    engine_python: Path | None = None
    """Python interpreter of the environment in which vLLM is installed. Default: this one (torch)."""
    engine_url: str | None = None
    """Base URL of a running vLLM server, such as http://127.0.0.1:8000/v1, or several separated by commas. Start it as
    docs/how-to/gpu.md describes (torch)."""
    engine_gpus: str | None = None
    """GPUs for vLLM, such as 1 or 1,2, numbered from 0 among those that CUDA_VISIBLE_DEVICES shows, as in `device`.
    Default: the learner's GPU (torch)."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of `vllm serve`, such as gpu_memory_utilization, or of a plugin's engine (torch)."""


class HardwareFields(OptionRecord):
    """What training runs on."""

    gpus: int = Field(default=1, ge=1)
    """GPUs per node (verl backend)."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of the Ray cluster (verl backend)."""
    staleness: int = Field(default=0, ge=0)
    """Maximum number of steps between the weights that sample a rollout and the weights that learn from it. 0
    alternates sampling and learning; more does both at once and corrects by truncated importance sampling."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """Options of verl itself, nested or dotted, passed to verl unchanged (verl backend)."""


class BatchFields(OptionRecord):
    """How large a step is, and when training ends early."""

    until: float | None = None
    """Early stopping: end the run once the training reward has reached this value in two consecutive steps."""
    batch_size: int = Field(default=8, ge=1)
    """Tasks per step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per task and step; their returns are compared with each other. ppo and reinforce++ also accept 1."""


class MethodFields(OptionRecord):
    """How the policies learn."""

    teacher: str | None = None
    """Teacher for algorithm = distil, which gives the probability of each sampled token: a model folder or name, or
    MODEL=URL of a vLLM server, with the same vocabulary as the policy. Or `self`: the policy itself, after it has read
    the result of a call; works with every algorithm (torch)."""
    teacher_options: dict[str, Any] = Field(default_factory=dict)
    """Options of teacher = self: told, top_k, divergence, weights, ema_decay, weight, hint, max_chars."""
    schedule: str | None = None
    """Which policies learn in a step. `alternate:K` trains one policy at a time, for K steps, while the others have
    their best weights so far and learn nothing (torch). Default: all learn in every step."""
    opponents: dict[str, int] | None = None
    """Populations of past weights for agents that play against others: AGENT=K, separated by commas. In each group of
    rollouts, one of these agents has the newest or one of K past weights, which learn nothing from it (torch)."""
    opponents_every: int | None = Field(default=None, ge=1)
    """Steps after which weights are frozen for a population. Default: those of a turn with schedule, otherwise 5."""
    with_prompts: bool = False
    """Learn from tasks that no rollout solves: a model proposes an instruction for an agent, the task is sampled under
    it, and the policy learns the answers that solved it as answers to the agent's own prompt (torch and tinker)."""
    reflector: str | None = None
    """Model that proposes instructions for with_prompts: [MODEL=]URL of an OpenAI-compatible server. Its key is read
    from LIGHTNING_REFLECT_KEY. Default: the model that is trained, with policies without its adapters."""
    prompt_options: dict[str, Any] = Field(default_factory=dict)
    """Options of with_prompts: visits, tasks, rollouts, proposals, tokens, solved, weight."""
    forks: int | None = Field(default=None, ge=1)
    """Maximum number of continuations per step that start at a call of a recorded rollout, for credit = counterfactual.
    Default: alternatives times the number of rollouts. With orders: maximum number of runs in which the frozen base
    replaces agents. Default: as many as orders needs."""
    alternatives: int = Field(default=3, ge=1)
    """Continuations of each call that is sampled again."""
    orders: int = Field(default=0, ge=0)
    """Log what each agent adds to its team (shapley/AGENT), estimated from this number of orders in which the agents of
    a rollout join, each paired with its reverse. Must be even; 0 measures nothing. The runs for this are not trained
    on."""
    fork_at: Literal["agents", "evenly", "entropy", "disagreement"] = "agents"
    """Which calls to sample again: the same number for each agent to train (agents), all calls equally likely (evenly),
    calls in proportion to the surprise of their answers (entropy), or agents in proportion to how much the rewards of
    their earlier alternatives differed (disagreement)."""
    fork_tools: dict[str, Literal["replay", "run", "refuse"]] = Field(default_factory=dict)
    """What a fork does with tools, by name or glob: replay returns the recorded result if the call was recorded
    (default for all tools), run calls the tool again, refuse never calls it."""
    normalise_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    alone: Alone = "skip"
    """What to do if only one rollout of a group contains calls of an agent, so that there is nothing to compare them
    with: ignore these calls (skip), or compare them with the agent's calls in the whole batch (torch)."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation, so that nearly equal returns do not give huge advantages."""


class OrderFields(OptionRecord):
    """The tasks to train on."""

    resample: int = Field(default=0, ge=0)
    """Rounds per step in which groups without a signal (all rollouts have the same reward) are replaced by groups of
    other tasks."""
    task_order: Literal["shuffled", "curriculum"] = "shuffled"
    """Order of the tasks after the first pass over them: shuffled again in each pass, or sampled by how often the
    policies solve them, so that fewer groups have no signal (curriculum, torch and tinker)."""


class TrainFields(
    HeldOutOptions,
    PortOptions,
    StoreOptions,
    ResumeOptions,
    RunFolderOptions,
    WorkOptions,
    LimitOptions,
    SeedOptions,
    ContextOptions,
    AnswerOptions,
    SampleOptions,
    FailureOptions,
    GradientOptions,
    OrderFields,
    LossOptions,
    MethodFields,
    CreditOptions,
    RateOptions,
    AlgorithmOptions,
    BatchFields,
    LengthOptions,
    HardwareFields,
    PrecisionOptions,
    AdapterOptions,
    MessageOptions,
    ModelFields,
    StartOptions,
    NameRuleOptions,
    PolicyOptions,
    EnvironmentOptions,
    ColumnOptions,
    DataFields,
    TaskOptions,
    AgentOptions,
):
    """The options, each with its type, default and help. Use `TrainConfig`, which checks them.

    The help lists them in the order of these records from the last to the first.
    """

    # What is kept.
    val_every: int | None = Field(default=None, ge=1)
    """Also validate every N steps, in addition to before and after training."""
    rollback_on_cliff: bool = False
    """If a policy's held-out reward falls significantly below its best, return the policy to its best weights and
    continue at a tenth of its learning rate (torch)."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. A checkpoint is also saved at the end, and after 15 minutes without one (torch)."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    checkpoint: Literal["newest", "full", "weights"] = "newest"
    """Which checkpoints also contain the state needed to resume exactly (master weights and moments, six times as large
    in bfloat16): the `newest`, each (full), or none (weights), so that the run cannot be resumed (torch)."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that get the metrics, separated by commas: mlflow, wandb. TensorBoard always gets them."""

    def step_count(self, task_count: int) -> int:
        """Return the number of steps of the whole run over this many tasks."""
        if self.steps is not None:
            return self.steps
        return steps_of_epochs(self.epochs or 1.0, task_count, self.batch_size)

    @property
    def learns_from_flat_groups(self) -> bool:
        """Whether there is something to learn from groups whose rewards are all equal."""
        divergence = self.kl_coef > 0 and self.kl_in == "loss"
        return divergence or self.entropy_coef > 0 or chosen_algorithm(self.algorithm).critic

    @property
    def uses_forks(self) -> bool:
        """Whether calls of a step's rollouts are sampled again."""
        return looks_at_forks(self.credit)

    @property
    def uses_judge(self) -> bool:
        """Whether a judge compares rollouts."""
        return self.reward == "judge" or bool(self.judge)

    @property
    def fork_count(self) -> int:
        """Maximum number of continuations per step that start at a call."""
        if self.forks is not None:
            return self.forks
        each = self.coalitions if self.by_coalitions else self.alternatives
        return self.batch_size * self.group_size * each if self.uses_forks or self.by_coalitions else 0

    @property
    def by_coalitions(self) -> bool:
        """Whether rollouts run again with the frozen base in place of some agents."""
        return self.orders > 0

    @property
    def coalitions(self) -> int:
        """Maximum number of runs for the orders of one rollout; 0 if a glob leaves the team open."""
        team = len(self.agents or ())
        return 0 if any(map(is_glob, self.agents or ())) else min(1 + self.orders * (team - 1), 2**team - 1)

    @property
    def declared(self) -> tuple[float, float] | None:
        """The range of all rewards, if it is known."""
        return self.work.declared(command=self.command, reward=self.reward)

    def worker_count(self) -> int:
        """Return the worker count: as requested, otherwise one per core but no more than a batch can use."""
        return worker_count(self.workers, self.batch_size * self.group_size, 1 if self.isolate else self.concurrency)
