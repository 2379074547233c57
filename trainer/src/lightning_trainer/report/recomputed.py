"""A run's results, recomputed from its store: credit, comparison, rows, account."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.grpo import GRPO
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.rewards import installed, read_rules
from lightning_trainer.rl.rewards.rules import RULES
from lightning_trainer.rl.rollouts import Outcome, outcomes


def recompute_batch(
    config: TrainConfig,
    store: Store,
    rollouts: Sequence[Rollout],
    *,
    every_agent: bool = True,
    imports: Container[str] = (),
) -> tuple[Batch, list[Outcome]]:
    """Return credit and comparison as in the run; comparisons with whole batches are replaced by those with the group.

    Args:
        config: of the run.
        store: contains its traces.
        rollouts: that have ended; whole groups.
        every_agent: compare all agents that have a name, including those that the run does not train.
        imports: the user's rules, ``module:function``, that may be imported. For others, the rewards recorded by the
            run count, because its folder may come from somebody else.
    """
    algorithm = algorithm_by_name(config.algorithm)
    algorithm = algorithm if algorithm.grouped else GRPO
    if every_agent and config.agents is not None:  # those selected by their path keep it as their name
        config = config.model_copy(update={"agents": (*config.agents, "*")})
    ended = outcomes(store, rollouts, config.timeouts)
    table = {name: value for name, value in config.rewards.items() if name in RULES or name in imports}
    with installed(read_rules(table, credit=config.credit, gamma=config.gamma)):
        return algorithm.batch(config, ended, lambda ids: traces_of(store, attempt_ids=ids), whole=False), ended
