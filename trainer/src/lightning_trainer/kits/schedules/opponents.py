"""`--opponents AGENT=K`: agents play against the newest or one of K past weights of their opponent.

All rollouts of a group meet the same opponent, because their rewards are compared and so must come from the same game.
Calls of frozen weights are recorded under the name of their adapter, and left out of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from lightning_spans.errors import ConfigError
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, StepRollouts
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.kits.schedules.alternate import without_rows
from lightning_trainer.kits.schedules.population import FrozenVersion, Opponent, Population, choose_opponent
from lightning_trainer.policies import Policies, parse
from lightning_trainer.rl.scores import rollout_rewards
from lightning_trainer.run.cliffs import PolicyKeeper, replace_weights
from lightning_trainer.run.state import checkpoints_by_age, read_state
from lightning_trainer.run.turns import policies_to_train, turn_of, turn_steps
from lightning_trainer.session.drafts import clear_drafts, remove_folder

if TYPE_CHECKING:
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.batch import Batch

OPPONENTS: Final = "opponents"  # in a run's folder and in its state, and kind of a log line
OF_OPPONENT: Final = "of the frozen weights of an opponent"
EVERY: Final = 5  # steps between two frozen versions


@runtime_checkable
class CopyKeeper(PolicyKeeper, Protocol):
    """A learner that serves frozen copies of policies next to the policies."""

    def load_copy(self, copy: str, policy: str, folder: Path, version: int) -> None:
        """Load weights of a policy that `save_policy` wrote into a copy, with their version number."""


def policy_sizes(config: TrainConfig) -> dict[str, int]:
    """Return the number of frozen versions that are kept of each policy: agents that share one share its population."""
    own = parse(config.policies)
    sizes: dict[str, int] = {}
    for agent, size in (config.opponents or {}).items():
        policy = str(own.of(agent))
        sizes[policy] = max(size, sizes.get(policy, 0))
    return sizes


class OpponentsKind(CallbackKind):
    """Takes part in runs with populations."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether an agent has a population."""
        return bool(config.opponents)

    def check(self, config: TrainConfig) -> None:
        """Reject a configuration that cannot have populations."""
        trained, own, opponents = policies_to_train(config), parse(config.policies), config.opponents or {}
        named = ", ".join(f"{agent}={size}" for agent, size in opponents.items())
        strangers = [agent for agent in opponents if config.policies.get(agent) is None]
        untrained = [agent for agent in opponents if own.of(agent) not in trained]
        refuse(
            {
                f"opponents = {named}: keep at least 1.": min(opponents.values()) < 1,
                f"opponents names {', '.join(strangers)}, which policies does not. Give each such agent a policy, such"
                f" as --policy {(strangers or [''])[0]}=lora.": bool(strangers),
                f"opponents names {', '.join(untrained)}, whose policy is not trained, so that it has no past weights."
                " Leave it out.": bool(untrained),
                f"opponents = {named} leaves no other agent that learns. Train at least two agents.": (
                    len(opponents) == 1 and set(own.trained) <= set(opponents)
                ),
                "opponents change between steps, but staleness samples ahead. Set staleness = 0.": config.staleness > 0,
                "forks would continue a rollout against other opponents. Leave opponents out, or credit ="
                f" {config.credit} and orders.": config.uses_forks or config.orders > 0,
                "opponents is for backend = torch. Leave it out.": config.backend == "tinker",
            }
        )
        taken = sorted({copy for each in _populations(config, {}) for copy in each.copies} & set(own.adapters))
        if taken:
            raise ConfigError(f"opponents: the policy name {taken[0]} is used for frozen weights. Give it another.")

    def learner_options(self, config: TrainConfig) -> Mapping[str, Any]:
        """Return the names of the adapters with frozen weights."""
        return {"copies": tuple(copy for each in _populations(config, {}) for copy in each.copies)}

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Open the callback that keeps the populations.

        Raises:
            ConfigError: the learner serves no copies, or frozen weights of the resumed run are missing.
        """
        return nullcontext(OpponentsCallback(context))


class OpponentsCallback(Callback):
    """Freezes weights, chooses an opponent for each group, and leaves its calls out.

    Args:
        context: of the run.
    """

    def __init__(self, context: CallbackContext) -> None:
        self._run, self._learner, self._app = context.run, context.learner, context.session.app
        config = self._config = context.run.config
        if not isinstance(context.learner, CopyKeeper):
            raise ConfigError(f"opponents is for backend = torch, not {config.backend}. Leave it out.")
        self._keeper = context.learner
        self._own = parse(config.policies)
        self._turn = None if config.schedule is None else turn_steps(config.schedule)
        self._every = config.opponents_every or self._turn or EVERY
        self._populations = {each.policy: each for each in _populations(config, context.kept.get(OPPONENTS, {}))}
        self._step, self._groups = 0, 0
        self._before: Mapping[str, Any] = {}  # `kept` as it was before this step
        self._met: dict[str, Opponent] = {}  # by group of this step
        for population in self._populations.values():
            clear_drafts(self._folder(population.policy, 0).parent)
            for member in population.members:
                self._load(population.policy, member)

    @property
    def kept(self) -> Mapping[str, Any]:
        """The frozen versions of each policy; the weights themselves are in the run's folder."""
        return {OPPONENTS: {policy: each.to_json() for policy, each in self._populations.items()}}

    def before_step(self, step: int) -> None:
        """Freeze the weights that are due."""
        self._step, self._groups, self._met = step, 0, {}
        self._before = self.kept[OPPONENTS]
        self._app.state.routing = replace(self._app.state.routing, opponents={})
        if step % self._every:
            return
        for policy, version in self._versions().items():
            population = self._populations[policy]
            member = None if version == population.last else population.add(step, version)
            if member is not None:
                replace_weights(self._keeper, policy, self._folder(policy, step), step)
                self._load(policy, member)

    def before_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Choose the opponent of each group, and route the opponent's calls in these rollouts."""
        versions, turn = self._versions(), self._policy_of_turn()
        policies = {agent: str(self._own.of(agent)) for agent in self._config.opponents or ()}
        past = {
            agent: self._populations[policy].past(versions[policy])
            for agent, policy in policies.items()
            if policy != turn
        }
        routed: dict[str, Policies] = dict(self._app.state.routing.opponents)
        for rollout in rollouts:
            if rollout.group_id not in self._met:
                opponent = choose_opponent(past, f"{self._config.seed}/{self._step}/{self._groups}")
                self._groups += 1
                if opponent is None:
                    return
                self._met[rollout.group_id] = opponent
            opponent = self._met[rollout.group_id]
            if opponent.frozen is not None:
                by_agent = {**self._own.by_agent, opponent.agent: opponent.frozen.copy}
                routed[rollout.rollout_id] = Policies(by_agent, self._own.fixed)
        self._app.state.routing = replace(self._app.state.routing, opponents=routed)

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:
        """Leave out the calls of frozen weights, and return the reward against each opponent."""
        copies = {copy for each in self._populations.values() for copy in each.copies}
        left_out = [row for row in batch.rows if row.policy in copies]
        calls = tuple(
            replace(call, left_out=OF_OPPONENT) if call.transition.policy in copies and call.left_out is None else call
            for call in batch.calls
        )
        account = without_rows(batch, left_out, OF_OPPONENT)
        kept = [row for row in batch.rows if row.policy not in copies]
        self._run.log.add_event(OPPONENTS, self._step, {"groups": {group: it.name for group, it in self._met.items()}})
        return replace(batch, rows=kept, calls=calls, account=account), self._rewards(rollouts)

    def after_save(self, checkpoint: Path, step: int) -> None:  # noqa: ARG002 - the frozen weights lie beside it
        """Remove frozen weights that no checkpoint needs. One that is written during a step has the state before it."""
        saved = [read_state(path).kept.get(OPPONENTS, {}) for path in checkpoints_by_age(self._run.folder)]
        for policy, population in self._populations.items():
            each = [population.to_json(), *(kept.get(policy, {}) for kept in (self._before, *saved))]
            needed = {self._folder(policy, step) for its in each for step, _ in its.get("versions", ())}
            for path in set(self._folder(policy, 0).parent.glob("step-*")) - needed:
                remove_folder(path)

    def _rewards(self, rollouts: StepRollouts) -> dict[str, float]:
        """Return the mean reward of the other agents against each opponent."""
        earned: defaultdict[str, list[float]] = defaultdict(list)
        for opponent in set(self._met.values()):
            groups = {group for group, met in self._met.items() if met == opponent}
            others = [agent for agent in self._config.agents or () if agent != opponent.agent]
            own = [outcome for outcome in rollouts.outcomes if outcome.rollout.group_id in groups]
            earned[opponent.name] += rollout_rewards(own, self._config.failed, others).values()
        return {f"reward_against/{name}": sum(its) / len(its) for name, its in sorted(earned.items()) if its}

    def _versions(self) -> dict[str, int]:
        """Return the number of the newest weights of each policy with a population."""
        return {each.model: each.version for each in self._learner.engines if each.model in self._populations}

    def _policy_of_turn(self) -> str | None:
        """Return the policy that learns now and so is not an opponent; None if all learn."""
        return None if self._turn is None else turn_of(self._step, policies_to_train(self._config), self._turn)

    def _folder(self, policy: str, step: int) -> Path:
        return self._run.folder / OPPONENTS / policy / f"step-{step:06d}"

    def _load(self, policy: str, member: FrozenVersion) -> None:
        folder = self._folder(policy, member.step)
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is missing: the weights of {policy} that opponents play with. Copy it from where the run"
                " was, or continue without opponents."
            )
        self._keeper.load_copy(member.copy, policy, folder, member.version)


def _populations(config: TrainConfig, kept: Mapping[str, Any]) -> list[Population]:
    return [
        Population(policy, size, config.seed, kept.get(policy, {})) for policy, size in policy_sizes(config).items()
    ]
