"""Callbacks: what takes part in the steps of a run, before a batch is made and after, without the loop knowing it.

A `CallbackKind` is registered by the hook `lightning_register_callbacks`, and decides by the configuration whether it
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
    """What a callback is opened with.

    Attributes:
        run: the run.
        session: runs rollouts.
        learner: the policy.
        load: loads another model, of a name and the learner's options.
        kept: `Callback.kept` of all callbacks in the checkpoint that the run goes on from.
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
        step: steps taken before.
        outcomes: of the rollouts.
        traces: reads the traces of attempts.
        kept: `Callback.kept` of all callbacks after the step before.
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
    """What a callback adds to a step before its batch is made.

    Attributes:
        outcomes: of rollouts of its own, for the batch.
        metrics: numbers by name.
    """

    outcomes: Sequence[Outcome] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Takes part in the steps of one run. Override what it needs."""

    @property
    def patience(self) -> int:
        """Number of first steps without anything to learn that a run takes, because it may help later."""
        return 0

    @property
    def kept(self) -> Mapping[str, Any]:
        """JSON by name that the checkpoint holds after a step; each replaces what its name had."""
        return {}

    def before_step(self, step: int) -> None:
        """Run before the rollouts of a step are sampled, and after a validation that is due.

        Raises:
            LightningError: the run can't continue.
        """

    def before_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Run before training rollouts are queued, groups as a whole: those of a step, and those that replace some."""

    def before_batch(self, rollouts: StepRollouts) -> Extra:  # noqa: ARG002 - for those that override it
        """Run once the rollouts of a step have ended.

        Raises:
            LightningError: the run can't continue.
        """
        return Extra()

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:  # noqa: ARG002
        """Return the batch that the policy learns from, and metrics by name.

        Raises:
            LightningError: the run can't continue.
        """
        return batch, {}

    def after_save(self, checkpoint: Path, step: int) -> None:
        """Add files to a checkpoint of so many steps, which is not in its place yet.

        Raises:
            OSError: they can't be written.
        """


class CallbackKind:
    """What is registered: it checks the configuration and opens a callback for a run. Override what it needs."""

    def wanted(self, config: TrainConfig) -> bool:  # noqa: ARG002 - for those that override it
        """Return whether it takes part in a run with this configuration."""
        return True

    def check(self, config: TrainConfig) -> None:
        """Refuse what can't work, before anything is opened.

        Raises:
            ConfigError: an option is wrong, or contradicts another one.
        """

    def learner_options(self, config: TrainConfig) -> Mapping[str, Any]:  # noqa: ARG002 - likewise
        """Return options of the learner that it sets, by name."""
        return {}

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:  # noqa: ARG002 - likewise
        """Open it for a run; it is closed when the run ends.

        Raises:
            LightningError: it can't take part.
        """
        return nullcontext(Callback())


def wanted_callbacks(config: TrainConfig) -> list[CallbackKind]:
    """Return the callbacks that take part in a run, in the order of their names."""
    kinds: Mapping[str, CallbackKind] = registry.registered("callback")
    return [kind for _, kind in sorted(kinds.items()) if kind.wanted(config)]


@contextmanager
def open_callbacks(context: CallbackContext) -> Iterator[list[Callback]]:
    """Open the callbacks that take part in a run."""
    with ExitStack() as stack:
        yield [stack.enter_context(kind.open(context)) for kind in wanted_callbacks(context.run.config)]
