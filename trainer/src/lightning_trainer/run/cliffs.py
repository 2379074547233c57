"""The best weights of each policy, and the return to them: `--rollback-on-cliff`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

from lightning_spans.errors import ConfigError
from lightning_trainer.policies import parse
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.teams.cliffs import Fall, best_step_of, fall_of, rewarded_names
from lightning_trainer.rl.scores import BY_TASK
from lightning_trainer.run.turns import last_turn, policies_to_train
from lightning_trainer.session.drafts import clear_drafts, remove_folder, replace_folder

if TYPE_CHECKING:
    from lightning_trainer.backend_protocol import Learner, OpenRun
    from lightning_trainer.report.log.lines import Line
    from lightning_trainer.run.state import State

BEST_WEIGHTS: Final = "best"  # in a run's folder: the best weights of each policy
STEP_NAME: Final = "step.json"  # among the weights of a policy: the number of steps after which it had them
SLOWER: Final = 0.1  # factor of the learning rate of a policy that fell
ROLLBACK: Final = "rollback"  # kind of a line in the log
_Comparison: TypeAlias = "tuple[str | None, list[Line]]"  # see `CliffGuard._comparison`


@dataclass(frozen=True, slots=True)
class PolicyReturn:
    """A return of a policy to its best weights.

    Attributes:
        policy: its name.
        after_steps: steps taken when it fell.
        to_step: steps after which its weights were best.
        learning_rate_factor: multiplies the scheduled learning rate from then on.
    """

    policy: str
    after_steps: int
    to_step: int
    learning_rate_factor: float

    @classmethod
    def from_line(cls, line: Line) -> PolicyReturn:
        """Read it from a line of the log of the kind `rollback`."""
        return cls(str(line["policy"]), line["step"], line["to_step"], line["learning_rate_factor"])


@runtime_checkable
class PolicyKeeper(Protocol):
    """A learner that writes and reads the weights of one policy."""

    def save_policy(self, policy: str, folder: Path) -> None:
        """Write the weights of a policy, without its optimiser."""

    def restore_policy(self, policy: str, folder: Path) -> None:
        """Return a policy to what `save_policy` wrote, with moments of 0, and publish it."""

    def slow_policy(self, policy: str, factor: float) -> None:
        """Multiply the scheduled learning rate by this factor, from now on."""


class CliffGuard:
    """Keeps the best weights of each policy, and returns a policy that fell to them.

    Args:
        run: provides log and folder.
        learner: has the policies.
        state: of the continued run; slowed policies stay slow.
    """

    def __init__(self, run: OpenRun, learner: Learner, state: State) -> None:
        self._run, config = run, run.config
        self._only = learner.engine.model
        keeper = learner if isinstance(learner, PolicyKeeper) and run.val else None
        if keeper is not None:
            for policy, factor in state.slowed.items():
                keeper.slow_policy(policy, factor)
        self._keeper = keeper if keeper and (config.rollback_on_cliff or config.policies) else None

    def watch(self, state: State) -> State:
        """Check the newest validation: keep what is best, and return what fell.

        Returns:
            The state, with the policies that now learn more slowly.

        Raises:
            ConfigError: the weights cannot be written.
        """
        config, keeper = self._run.config, self._keeper
        if keeper is None:
            return state
        comparison, slowed = self._comparison(state.step), dict(state.slowed)
        learned, compared = comparison
        for policy, names in self._keep_best(keeper, state.step, comparison).items():
            folder = self._run.folder / BEST_WEIGHTS / policy
            can_fall = config.rollback_on_cliff and learned in (None, policy)
            fall = fall_of(compared, policy, names) if can_fall else None
            if fall is not None and folder.is_dir():
                slowed[policy] = slowed.get(policy, 1.0) * SLOWER
                keeper.restore_policy(policy, folder)
                keeper.slow_policy(policy, slowed[policy])
                self._record(fall, state.step, slowed[policy])
        return replace(state, slowed=slowed)

    def resume(self, step: int) -> None:
        """Remove best weights of later steps, which a resumed run takes again and its log no longer has, and drafts.

        If the weights after this step were the best until then, write them.

        Raises:
            ConfigError: the weights cannot be written.
        """
        clear_drafts(self._run.folder / BEST_WEIGHTS)
        for folder in (self._run.folder / BEST_WEIGHTS).glob("*"):
            if (later := _step_of(folder)) is not None and later > step:
                remove_folder(folder)
                self._run.progress.note(
                    f"the best weights of {folder.name}, after {later} steps, are removed: the run continues after"
                    f" {amount(step, 'step')}"
                )
        if self._keeper is not None and self._run.log.validations():
            self._keep_best(self._keeper, step, self._comparison(step))

    def _keep_best(self, keeper: PolicyKeeper, step: int, comparison: _Comparison) -> dict[str, list[str]]:
        """Write the weights of the policies that are best now, and return each policy's names as in `_names`."""
        config, newest = self._run.config, self._run.log.validations()[-1]
        returns = config.rollback_on_cliff or config.schedule is not None  # also to the weights before training
        names, (learned, compared) = self._names(newest.get(BY_TASK, {})), comparison
        for policy, its in names.items():
            folder, validations = self._run.folder / BEST_WEIGHTS / policy, compared
            if learned not in (None, policy):  # its weights are those of its last turn
                validations = [] if folder.is_dir() else [newest]
            if best_step_of(validations, its) == step and (step or returns):
                replace_weights(keeper, policy, folder, step)
        return names

    def _comparison(self, step: int) -> _Comparison:
        """Return the policy that learned last (None: all learn) and the validations that show how well it does.

        In its turn, these are the validations of the turn, and the last one in which best weights were kept before it:
        the other policies have the same weights in all of them.
        """
        config, validations = self._run.config, self._run.log.validations()
        turn = last_turn(config, step)
        if turn is None:
            return None, validations
        learned, began = turn
        steps = [_step_of(self._run.folder / BEST_WEIGHTS / policy) for policy in policies_to_train(config)]
        start = max((its for its in steps if its is not None), default=None)
        return learned, [line for line in validations if line["step"] > began or line["step"] == start]

    def _names(self, by_task: Mapping[str, object]) -> dict[str, list[str]]:
        """Return for each trained policy the names whose rewards are its own."""
        if not self._run.config.policies:
            return {self._only: [""]}
        own, trained = parse(self._run.config.policies), policies_to_train(self._run.config)
        policy_of = {agent: policy for agent in by_task if agent and (policy := own.of(agent)) in trained and policy}
        return {policy: [""] for policy in trained} | rewarded_names([{BY_TASK: by_task}], policy_of)

    def _record(self, fall: Fall, step: int, factor: float) -> None:
        facts = {"policy": fall.policy, "to_step": fall.best_step, "best": fall.best, "reward": fall.now}
        self._run.log.add_event(ROLLBACK, step, {**facts, "learning_rate_factor": factor})
        self._run.progress.note(
            f"{fall.policy} fell: its held-out reward is {fall.now:.2f}, and was {fall.best:.2f} after"
            f" {fall.best_step} steps. It returns to those weights, at {factor:g} times the learning rate"
        )


def replace_weights(keeper: PolicyKeeper, policy: str, folder: Path, step: int) -> None:
    """Write the weights of a policy after so many steps to a folder, completely or not at all.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        with replace_folder(folder) as draft:
            keeper.save_policy(policy, draft)
            (draft / STEP_NAME).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"weights of {policy} can't be written to {folder}: {error.strerror}.") from error


def _step_of(folder: Path) -> int | None:
    """Return after how many steps a policy had the weights in a folder; None if an older version wrote them."""
    path = folder / STEP_NAME
    return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.is_file() else None
