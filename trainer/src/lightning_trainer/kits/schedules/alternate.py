"""`--schedule alternate:K`: one policy learns at a time, for K steps, against the best weights of the others.

At the end of its turn, a policy returns to its best weights against these others. So the other policies always answer
with their best weights, and a turn starts from them. The rows of the others are left out of the batch, so that their
optimisers take no step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, StepRollouts
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.account import Account
from lightning_trainer.run.cliffs import BEST_WEIGHTS, PolicyKeeper
from lightning_trainer.run.turns import policies_to_train, turn_of, turn_steps

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rows import Row

TURN: Final = "turn"  # kind of a log line
FROZEN: Final = "of a policy that does not learn in this turn"


def _divisors(steps: int) -> str:
    return " or ".join(str(number) for number in range(1, steps + 1) if steps % number == 0)


class AlternateKind(CallbackKind):
    """Takes part in runs with a schedule."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether there is a schedule."""
        return config.schedule is not None

    def check(self, config: TrainConfig) -> None:
        """Reject a configuration in which policies cannot alternate."""
        steps = turn_steps(str(config.schedule))
        refuse(
            {
                f"schedule = {config.schedule} alternates between policies. Give at least two agents their own, such"
                " as --policy writer=lora,checker=lora.": len(policies_to_train(config)) < 2,
                f"schedule = {config.schedule} returns policies to their best weights, which only validations find."
                " Set val and val_every.": config.val is None or config.val_every is None,
                f"schedule = {config.schedule} returns policies to their best weights, and a judge's scores can't be"
                " compared across validations. Use a reward function, or leave it out.": config.uses_judge,
                f"schedule = {config.schedule}: a turn ends with a validation, but val_every = {config.val_every} does"
                f" not divide {steps}. Set val_every to {_divisors(steps)}.": (
                    config.val_every is not None and steps % config.val_every != 0
                ),
                f"schedule = {config.schedule} changes weights between"
                " steps, but staleness samples ahead. Set staleness = 0.": config.staleness > 0,
                f"schedule = {config.schedule} trains one policy at a time, and with_prompts trains every agent that"
                " an instruction helped. Leave one of them out.": config.with_prompts,
                "schedule is for backend = torch. Leave it out.": config.backend == "tinker",
            }
        )

    def learning_steps(self, config: TrainConfig, steps: int) -> int:
        """Return the number of steps in the turns of the first policy, which has the most."""
        policies, turn = policies_to_train(config), turn_steps(str(config.schedule))
        return sum(turn_of(step, policies, turn) == policies[0] for step in range(steps)) if policies else steps

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Open the callback that alternates between policies.

        Raises:
            ConfigError: the learner cannot return a policy to earlier weights.
        """
        return nullcontext(AlternateCallback(context))


class AlternateCallback(Callback):
    """Lets one policy learn at a time.

    Args:
        context: of the run.
    """

    def __init__(self, context: CallbackContext) -> None:
        self._run = context.run
        if not isinstance(context.learner, PolicyKeeper):
            raise ConfigError(f"schedule is for backend = torch, not {context.run.config.backend}. Leave it out.")
        self._keeper = context.learner
        self._policies = policies_to_train(context.run.config)
        self._steps = turn_steps(str(context.run.config.schedule))

    def before_step(self, step: int) -> None:
        """At the start of a turn, return the policy whose turn has ended to its best weights, if they are known."""
        if step % self._steps:
            return
        facts = {"policy": turn_of(step, self._policies, self._steps)}
        if step:
            ended = turn_of(step - 1, self._policies, self._steps)
            folder = self._run.folder / BEST_WEIGHTS / ended
            if folder.is_dir():
                self._keeper.restore_policy(ended, folder)
                facts["restored"] = ended
            else:
                self._run.progress.note(f"{ended} keeps its newest weights: {folder} is missing")
        self._run.log.add_event(TURN, step, facts)

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:
        """Leave out the rows of all other policies than the one that learns."""
        turn = turn_of(rollouts.step, self._policies, self._steps)
        kept = [row for row in batch.rows if row.policy == turn]
        left_out = [row for row in batch.rows if row.policy != turn]
        metrics = {f"turn/{policy}": float(policy == turn) for policy in self._policies}
        return replace(batch, rows=kept, account=without_rows(batch, left_out)), metrics


def without_rows(batch: Batch, rows: Sequence[Row], reason: str = FROZEN) -> Account:
    """Return the account of a batch without these rows of frozen policies, with their calls dropped for this reason."""
    account, calls = batch.account, sum(row.transitions for row in rows)
    tokens_of = {
        (call.transition.attempt_id, call.transition.span_id, call.transition.choice): call.transition.tokens
        for call in batch.calls
    }
    read = [tokens_of[row.attempt_id, *call] for row in rows for call in row.calls]
    return replace(
        account,
        dropped={**account.dropped, reason: calls} if calls else account.dropped,
        trained=account.trained - calls,
        rows=account.rows - len(rows),
        rows_without_gradient=account.rows_without_gradient - sum(not row.has_gradient for row in rows),
        tokens=account.tokens - sum(sum(row.lengths) for row in rows),
        tokens_in_rows=account.tokens_in_rows - sum(len(row.tokens) for row in rows),
        tokens_in_calls=account.tokens_in_calls - sum(len(t.prompt) + len(t.response) for t in read if t is not None),
    )
