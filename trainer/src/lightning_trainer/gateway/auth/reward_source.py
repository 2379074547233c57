"""Writes who gave a reward into its source and id, and when, where its sender cannot change it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store
from lightning_spans.store.deployments import Assignment
from lightning_spans.store.protocol import Where, each
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import bad_request, forbidden

EVALUATOR: Final = "evaluator"


def given_by(grant: Grant, rewards: Sequence[Reward], store: Store) -> list[Reward]:
    """Return rewards with their giver.

    An evaluator's rewards have the source ``evaluator:HOLDER`` and, after a slash, the source that it named. Only
    existing attempts can be rewarded, under their own rollout, and conversations of a deployed agent outside attempts,
    under their own name (``conversation:NAME``). Nobody else may use sources of that form, except an admin, who copies
    them. The ids of an evaluator's or a runner's rewards get their giver and attempt: an id that another one has used
    must not make the store take a reward for one that it has.

    Raises:
        Refusal: a source claims to be an evaluator's, or an attempt does not exist.
    """
    if grant.scope != EVALUATOR:
        if grant.scope != "admin" and any(reward.source.startswith(EVALUATOR) for reward in rewards):
            raise forbidden("a source that begins with 'evaluator' needs an evaluator's key")
        return list(rewards) if grant.scope == "admin" else [_with_own_id(reward, "") for reward in rewards]
    wanted = sorted({reward.attempt_id for reward in rewards})
    known = {record.attempt_id: record.rollout.rollout_id for record in store.attempts(attempt_ids=wanted)}
    talks = [attempt_id for attempt_id in wanted if attempt_id not in known]
    known |= {one.attempt_id: one.attempt_id for one in each(store, Assignment, Where(attempt_ids=talks))}
    for reward in rewards:
        if known.get(reward.attempt_id) != reward.rollout_id:
            raise bad_request(f"there is no attempt {reward.attempt_id!r} of rollout {reward.rollout_id!r}")
    giver = f"{_name(grant)}/"
    return [replace(_with_own_id(reward, giver), source=_source(grant, reward)) for reward in rewards]


def given_now(rewards: Sequence[Reward], store: Store) -> list[Reward]:
    """Return rewards; those of running attempts get the current time, and count for the calls that have ended by now.

    A time that the sender gave stays. A reward after the end of its attempt counts for all of it, as does one without a
    time.
    """
    wanted = sorted({reward.attempt_id for reward in rewards if reward.given_ns is None})
    running = _running_ids(store.attempts(attempt_ids=wanted)) if wanted else frozenset()
    now_ns = time.time_ns()
    return [
        replace(reward, given_ns=now_ns) if reward.attempt_id in running and reward.given_ns is None else reward
        for reward in rewards
    ]


def _running_ids(attempts: Iterable[AttemptRecord]) -> frozenset[str]:
    return frozenset(attempt.attempt_id for attempt in attempts if attempt.status == "running")


def _with_own_id(reward: Reward, giver: str) -> Reward:
    return replace(reward, reward_id=f"{giver}{reward.attempt_id}/{reward.reward_id}")


def _name(grant: Grant) -> str:
    return f"{EVALUATOR}:{grant.holder or 'unnamed'}"


def _source(grant: Grant, reward: Reward) -> str:
    name = _name(grant)
    return name if reward.source in {"run", EVALUATOR} else f"{name}/{reward.source}"
