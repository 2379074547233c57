"""The forks of a step as a callback of a run: they run before the batch is made, and are compared in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, Extra, StepRollouts
from lightning_trainer.kits.forks.steps import (
    SPREAD,
    ForkPlan,
    ForkResults,
    agent_shares,
    count_forks,
    plan_forks,
    refuse_ended,
)
from lightning_trainer.policies import BASE
from lightning_trainer.rl.batch.attempts import played_of
from lightning_trainer.rl.credit.counterfactual import Cells

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.rollouts import Outcome


class ForksKind(CallbackKind):
    """Forks rollouts in runs whose credit compares alternatives, or that measure coalitions of agents."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether rollouts are forked."""
        return config.uses_forks or config.by_coalitions

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Return the callback that forks the rollouts of each step.

        Raises:
            ConfigError: coalitions need the frozen base model, and it is not served.
        """
        config = context.run.config
        if config.by_coalitions and BASE not in [engine.model for engine in context.learner.engines]:
            raise ConfigError(f"orders = {config.orders} needs the frozen base, and backend {config.backend} has none.")
        return nullcontext(ForksCallback(context))


class ForksCallback(Callback):
    """Samples calls of a step's rollouts again.

    Args:
        context: the run's parts.
    """

    def __init__(self, context: CallbackContext) -> None:
        self._run, self._session = context.run, context.session
        self._logged: set[str] = set()  # reasons
        self._spread: dict[str, float] = {}

    @property
    def kept(self) -> Mapping[str, Any]:
        """By agent, how far the rewards of alternatives to its calls differed."""
        return {SPREAD: self._spread}

    def before_batch(self, rollouts: StepRollouts) -> Extra:
        """Run the forks of a step. Returns them and their cost."""
        config, began = self._run.config, time.monotonic()
        with waiting("rows", f"the calls of {len(rollouts.outcomes)} rollouts to be chosen from"):
            plan = plan_forks(config, self._session.store, rollouts)
        run = partial(self._session.run, check=self._run.check)
        forks = run(plan.rollouts, self._run.progress, plan.phase) if plan.rollouts else []
        found = count_forks(plan, forks, rollouts.traces)
        if rollouts.step == 0:
            refuse_ended(plan, found)
            self._run.progress.note(found.line)
        self._log_reasons(plan, found)
        numbers, spread = self._compare(rollouts, forks)
        if config.by_coalitions:  # coalitions are measured, and nothing is trained on them
            forks = []
        metrics = {**found.metrics, **numbers, "fork_seconds": time.monotonic() - began}
        self._spread = {**rollouts.kept.get(SPREAD, {}), **spread}
        return Extra(outcomes=forks, metrics=metrics)

    def _compare(self, rollouts: StepRollouts, forks: list[Outcome]) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return what each agent of a team adds, and the spread of rewards of alternatives to its calls."""
        config, outcomes = self._run.config, [*rollouts.outcomes, *forks]
        shares, spread = {}, {}
        if config.fork_at == "disagreement":
            spread = Cells.of(played_of(outcomes, rollouts.traces, config.failed)).spread
        if config.by_coalitions:
            shares = agent_shares(played_of(outcomes, rollouts.traces, config.failed, config.agents))
        return shares, spread

    def _log_reasons(self, plan: ForkPlan, found: ForkResults) -> None:
        """Log why forks ended or could not be made, each reason once."""
        for reasons, text in (
            (found.ended, "forks deviated from the recording"),
            (plan.refused, "calls could not be forked"),
        ):
            if new := reasons.keys() - self._logged:
                self._run.progress.note(f"{sum(reasons.values())} {text}: {'; '.join(sorted(new)[:3])}")
                self._logged |= new
