"""A run's results, recomputed from its store: credit, comparison, rows, account."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.grpo import GRPO
from lightning_trainer.rl.batch.batch import Batch, join_batches
from lightning_trainer.rl.rewards import installed, read_rules
from lightning_trainer.rl.rewards.rules import RULES
from lightning_trainer.rl.rollouts import Outcome, outcomes
from lightning_trainer.rl.scores import reward_of_failures
from lightning_trainer.run.group_ids import Step, step_of

Failures: TypeAlias = Callable[[Sequence[Outcome]], float]  # returns the reward of failures caused by the policy


def recompute_batch(
    config: TrainConfig,
    store: Store,
    rollouts: Sequence[Rollout],
    *,
    every_agent: bool = True,
    imports: Container[str] = (),
    failures: Failures | None = None,
    whole: bool = False,
    merge: bool = True,
) -> tuple[Batch, list[Outcome]]:
    """Return credit and comparison as in the run.

    Args:
        config: of the run.
        store: contains its traces.
        rollouts: that have ended; whole groups.
        every_agent: compare all agents that have a name, including those that the run does not train.
        imports: the user's rules, ``module:function``, that may be imported. For others, the rewards recorded by the
            run count, because its folder may come from somebody else.
        failures: used if a failure earns the lowest reward of its step and the rollouts are only a part of the step.
            None: they are whole steps.
        whole: whether all comparisons are made as in the run, for which the rollouts have to be those of a whole batch.
            Otherwise those with the batch are replaced by those with the group.
        merge: whether calls that continue an earlier one share its row.
    """
    algorithm = algorithm_by_name(config.algorithm)
    if not whole and not algorithm.grouped:
        algorithm, config = GRPO, config.model_copy(update={"alone": "batch"})
    if every_agent and config.agents is not None:  # those selected by their path keep it as their name
        config = config.model_copy(update={"agents": (*config.agents, "*")})
    ended = outcomes(store, rollouts, config.timeouts)
    table = {name: value for name, value in config.rewards.items() if name in RULES or name in imports}
    batches: list[Batch] = []
    known = set[str]()
    with installed(read_rules(table, credit=config.credit, gamma=config.gamma)):
        for its in _parts_of(config, ended):
            batch = algorithm.batch(
                _with_reward_of_failures(config, its, failures),
                its,
                lambda ids: traces_of(store, attempt_ids=ids),
                known,
                whole=whole and config.backend != "verl",
                merge=merge,
            )
            batches.append(batch)
            known |= {name for name in batch.agents if name is not None}
    return join_batches(batches), ended


def _parts_of(config: TrainConfig, ended: Iterable[Outcome]) -> Iterable[Sequence[Outcome]]:
    """Return the outcomes in the parts in which the run compared them: by step, or on verl by group."""
    parts: defaultdict[Step | str, list[Outcome]] = defaultdict(list)
    for outcome in ended:
        group_id = outcome.rollout.group_id
        parts[group_id if config.backend == "verl" else step_of(group_id)].append(outcome)
    return parts.values()


def _with_reward_of_failures(config: TrainConfig, its: Sequence[Outcome], failures: Failures | None) -> TrainConfig:
    """Return the options with the reward of failures as a number, if they earn the lowest reward."""
    if config.failed != "lowest":
        return config
    if failures is not None and config.backend != "verl":
        return config.model_copy(update={"failed": failures(its)})
    given = [outcome.without(config.rewards) for outcome in its]  # the run stored those of its rules afterwards
    return config.model_copy(update={"failed": reward_of_failures(given, config.failed)})
