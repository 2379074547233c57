"""Who gives a reward: it is written into the reward's source, where its sender can't change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lightning_spans.rewards import Reward
from lightning_spans.store import Store
from lightning_trainer.server.keys import Grant
from lightning_trainer.server.refusals import bad_request, forbidden

EVALUATOR: Final = "evaluator"


def given_by(grant: Grant, rewards: Sequence[Reward], store: Store) -> list[Reward]:
    """Give rewards with who gave them.

    An evaluator's rewards have the source ``evaluator:HOLDER`` and, after a slash, the source that it named. Only
    attempts that are there can be rewarded, under their own rollout. Nobody else may use sources of that form, except
    an admin, who copies them.

    Raises:
        Refusal: a source pretends to be an evaluator's, or an attempt is not there.
    """
    if grant.scope != EVALUATOR:
        if grant.scope != "admin" and any(reward.source.startswith(EVALUATOR) for reward in rewards):
            raise forbidden("a source that begins with 'evaluator' needs an evaluator's key")
        return list(rewards)
    wanted = sorted({reward.attempt_id for reward in rewards})
    known = {record.attempt_id: record.rollout.rollout_id for record in store.attempts(attempt_ids=wanted)}
    for reward in rewards:
        if known.get(reward.attempt_id) != reward.rollout_id:
            raise bad_request(f"there is no attempt {reward.attempt_id!r} of rollout {reward.rollout_id!r}")
    return [replace(reward, source=_source(grant, reward)) for reward in rewards]


def _source(grant: Grant, reward: Reward) -> str:
    name = f"{EVALUATOR}:{grant.holder or 'unnamed'}"
    return name if reward.source in {"run", EVALUATOR} else f"{name}/{reward.source}"
