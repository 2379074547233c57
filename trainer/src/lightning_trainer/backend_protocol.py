"""The interface of a backend, and the open run that it is given.

A backend is registered under a name by the hook `lightning_register_backends`. `lightning_trainer.train` looks it up
and opens what every run needs: the folder, the agent's workers, the store, the log. The backend does the rest: it
serves the policy to the agents, takes the steps, logs the metrics of each, and leaves its newest weights at
``checkpoint`` in the run's folder.

A backend that learns in this process need not write that either: `lightning_trainer.run.embedded.EmbeddedBackend` takes
the steps with a `Learner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_spans.errors import LightningError
from lightning_trainer.config.files import CONFIG_NAME, to_json
from lightning_trainer.report.metrics import write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_spans.store import Store
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.gateway.engine import Engine
    from lightning_trainer.judges import RolloutJudge
    from lightning_trainer.report.learned_tokens import SeenTokens
    from lightning_trainer.report.metrics import MetricLog
    from lightning_trainer.report.progress import Progress
    from lightning_trainer.rl.rewards.judge import JudgeRule
    from lightning_trainer.rl.rows import Row
    from lightning_trainer.runner.runner import Runner


class UpdateRefusedError(LightningError):
    """A learner refused an update before it changed anything, so the earlier steps can be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins.

    Attributes:
        step: number of earlier steps.
        folder: of the run that resumes; None: the run is new.
        checkpoint: what it resumes from, in the backend's own form; None: the run is new.
        seconds: time that its earlier parts took.
    """

    step: int = 0
    folder: Path | None = None
    checkpoint: Path | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """An open run. The code that opened it closes it.

    Attributes:
        config: what to train, on what, and how.
        tasks: training tasks.
        val: held-out tasks; may be empty.
        rules: automatic rewards.
        judge: gives rewards to rollouts by comparing those of a group; None: no judge.
        identity: options that must not change when the run resumes.
        start: where it begins, as returned by the backend.
        folder: the run's.
        store: takes rollouts, and contains what agents and gateway recorded.
        runner: has started its workers, and claims nothing until `lightning_trainer.session.session.serve` lets it.
        log: of metrics.
        progress: callback for progress events.
        check: raises if the program was asked to stop. Call it between steps, and while waiting.
    """

    config: TrainConfig
    tasks: Sequence[dict[str, Any]]
    val: Sequence[dict[str, Any]]
    folder: Path
    store: Store
    runner: Runner
    log: MetricLog
    progress: Progress
    check: Callable[[], None]
    start: Start = field(default_factory=Start)
    identity: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[JudgeRule] = ()
    judge: RolloutJudge | None = None

    @property
    def steps(self) -> int:
        """Steps of the whole run, unless it ends early."""
        return self.config.step_count(len(self.tasks))

    def begin(self) -> None:
        """Write the configuration into the folder. A new run that fails before this leaves no folder behind."""
        kept = self.config.model_copy(update={"out": self.folder})
        write_atomically(self.folder / CONFIG_NAME, to_json(kept).encode())


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What a run would do and need.

    Attributes:
        text: for people.
        facts: the same as a JSON object; empty if there is only text.
    """

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Trains. Registered by name, and chosen by the option `backend`."""

    def start(self, config: TrainConfig, identity: Mapping[str, Any]) -> Start:
        """Return where a run begins. Nothing is open yet, so options that cannot work are refused here.

        Args:
            config: of the run.
            identity: options that must be the same as those of the run that resumes.

        Raises:
            ConfigError: an option is not for this backend, a package is missing, or there is nothing to resume from.
        """
        ...

    def train(self, run: OpenRun) -> int:
        """Take the run's steps, and log the metrics of each to `run.log`.

        It calls `run.begin` once all its own resources are open.

        Returns:
            Total number of steps, earlier ones included.

        Raises:
            LightningError: there is nothing to learn, or a part failed.
            SavedInterrupt: `run.check` raised it. What was learned is saved.
        """
        ...

    def learner(self, model: str, options: Mapping[str, Any]) -> Learner:
        """Load a model to learn from data, without a run.

        Args:
            model: where to start.
            options: of the learner, by name.

        Raises:
            ConfigError: this backend does not learn in this process, an option is wrong, or the model cannot be loaded.
        """
        ...

    def describe(self, config: TrainConfig, progress: Progress) -> RunDescription:
        """Return what a run would do and need. Nothing that it tries for this is kept.

        Raises:
            LightningError: an option is wrong, or a trial failed.
        """
        ...


class Learner(Protocol):
    """One or several policies in this process: engines, weights, optimisers."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def schedule(self, rise: int, steps: int) -> None:
        """Warm up the learning rate over its first steps, then decay it to a tenth by the last.

        Call it before the first update.

        Args:
            rise: steps of the warm-up.
            steps: total steps; more than `rise`.
        """
        ...

    def logprobs(self, rows: Sequence[Row], candidates: Sequence[NDArray[Any]] | None = None) -> Sequence[NDArray[Any]]:
        """Return for each row (K,) natural log-probabilities of its trained tokens, without gradient.

        Args:
            rows: any.
            candidates: for each row (K, C) possible tokens at its trained positions; then (K, C) log-probabilities of
                these are returned instead.
        """
        ...

    def likeliest(self, rows: Sequence[Row], count: int) -> Sequence[NDArray[Any]]:
        """Return for each row (K, C) the most likely tokens under the policy at each of its trained tokens.

        Args:
            rows: any.
            count: C; all tokens if the vocabulary has fewer.
        """
        ...

    @property
    def engine(self) -> Engine:
        """Generates with the newest weights."""
        ...

    @property
    def engines(self) -> Sequence[Engine]:
        """One for each served policy, by the engine's `model`; `engine` is the first."""
        ...

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimiser step on these rows and publish the weights to the engine.

        Returns:
            Metrics by name: loss, grad_norm, clip_fraction, kl, entropy, logprob_gap (mean absolute difference between
            the engine's recorded log-probabilities and the trainer's), tokens, seconds.
        """
        ...

    @property
    def seen(self) -> Mapping[Row, SeenTokens]:
        """The last update's view of the rows that it read, by row. Empty before the first."""
        ...

    def penalties(self, rows: Sequence[Row]) -> Sequence[NDArray[Any]]:
        """Return the divergence penalty on the reward, for each row (K,) at its trained tokens (`kl_in = "reward"`).

        Returns:
            The weight of the divergence times its estimate, from the log-probabilities with which tokens were sampled.
        """
        ...

    def save(self, folder: Path, *, resumable: bool = True) -> None:
        """Write weights (a model folder that `serve` and transformers can load), optimiser and random state.

        Args:
            folder: where to.
            resumable: False writes the weights alone.

        Raises:
            OSError: they cannot be written.
        """
        ...

    def strip(self, folder: Path) -> None:
        """Remove the parts of a checkpoint by `save` that only `load` needs, and leave the weights."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit.

        Raises:
            ConfigError: the folder is a checkpoint of another model or kind.
        """
        ...

    def close(self) -> None:
        """Stop the engine and free memory."""
        ...


@runtime_checkable
class TeacherPolicy(Protocol):
    """A learner that also keeps weights other than the newest, for a teacher that is the policy itself."""

    def teacher_logprobs(
        self, rows: Sequence[Row], candidates: Sequence[NDArray[Any]] | None = None
    ) -> Sequence[NDArray[Any]]:
        """Return the same as `Learner.logprobs`, with the weights that the learner's options name."""
        ...
