"""Callbacks, which take part in the steps of a run before and after a batch is made; the loop does not know them.

A `CallbackKind` is registered by the hook `lightning_register_callbacks`, and decides from the configuration whether it
takes part. Backends that learn in this process call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_trainer import registry

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.backend_protocol import Learner, OpenRun
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.session.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackContext:
    """Arguments with which a callback is opened.

    Attributes:
        run: the run.
        session: runs rollouts.
        learner: the policy.
        load: loads another model, from its name and the learner's options.
        kept: `Callback.kept` of all callbacks in the checkpoint from which the run resumes.
    """

    run: OpenRun
    session: Session
    learner: Learner
    load: Callable[[str, Mapping[str, Any]], Learner]
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of a step, which have all ended.

    Attributes:
        name: of the run, unique in the store.
        step: number of earlier steps.
        outcomes: of the rollouts.
        traces: reads the traces of attempts.
        kept: `Callback.kept` of all callbacks after the previous step.
        seen: the traces that were read for the batch; empty before it is made.
    """

    name: str
    step: int
    outcomes: Sequence[Outcome]
    traces: Traces
    kept: Mapping[str, Any] = field(default_factory=dict)
    seen: Sequence[Trace] = ()


@dataclass(frozen=True, slots=True)
class Extra:
    """Additions of a callback to a step before its batch is made.

    Attributes:
        outcomes: of its own rollouts, for the batch.
        metrics: numbers by name.
    """

    outcomes: Sequence[Outcome] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Takes part in the steps of one run. Override the methods that you need."""

    @property
    def patience(self) -> int:
        """Number of initial steps with nothing to learn that a run accepts, because the callback may help later."""
        return 0

    @property
    def kept(self) -> Mapping[str, Any]:
        """JSON by name, stored in the checkpoint after a step; each value replaces the previous one of its name."""
        return {}

    def before_step(self, step: int) -> None:
        """Run before the rollouts of a step are sampled, and after a validation that is due.

        Raises:
            LightningError: the run cannot continue.
        """

    def before_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Run before training rollouts are queued, in whole groups: those of a step, and replacements of some."""

    def before_batch(self, rollouts: StepRollouts) -> Extra:  # noqa: ARG002 - for those that override it
        """Run once the rollouts of a step have ended.

        Raises:
            LightningError: the run cannot continue.
        """
        return Extra()

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:  # noqa: ARG002
        """Return the batch that the policy learns from, and metrics by name.

        Raises:
            LightningError: the run cannot continue.
        """
        return batch, {}

    def after_save(self, checkpoint: Path, step: int) -> None:
        """Add files to the checkpoint after so many steps, before it is moved to its final place.

        Raises:
            OSError: they cannot be written.
        """


class CallbackKind:
    """The registered object: checks the configuration and opens a callback for a run.

    Override the methods that you need.
    """

    def wanted(self, config: TrainConfig) -> bool:  # noqa: ARG002 - for those that override it
        """Return whether it takes part in a run with this configuration."""
        return True

    def check(self, config: TrainConfig) -> None:
        """Refuse options that cannot work, before anything is opened.

        Raises:
            ConfigError: an option is wrong, or contradicts another one.
        """

    def learner_options(self, config: TrainConfig) -> Mapping[str, Any]:  # noqa: ARG002 - likewise
        """Return the learner options that it sets, by name."""
        return {}

    def learning_steps(self, config: TrainConfig, steps: int) -> int:  # noqa: ARG002 - likewise
        """Return in how many of a run's steps a policy learns."""
        return steps

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:  # noqa: ARG002 - likewise
        """Open it for a run; it is closed when the run ends.

        Raises:
            LightningError: it cannot take part.
        """
        return nullcontext(Callback())


def wanted_callbacks(config: TrainConfig) -> list[CallbackKind]:
    """Return the callbacks that take part in a run, in the order of their names."""
    kinds: Mapping[str, CallbackKind] = registry.registrations("callback")
    return [kind for _, kind in sorted(kinds.items()) if kind.wanted(config)]


@contextmanager
def open_callbacks(context: CallbackContext) -> Iterator[list[Callback]]:
    """Open the callbacks that take part in a run."""
    with ExitStack() as stack:
        yield [stack.enter_context(kind.open(context)) for kind in wanted_callbacks(context.run.config)]
