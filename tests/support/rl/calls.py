"""Recorded calls by their token ids, and the rows that they become."""

from __future__ import annotations

import numpy as np

from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.rows import make_rows


def call(turn, prompt, response, *, agent="writer", attempt="a0", temperature=None, logprob=-0.5, **other):
    logprobs = tuple(logprob - i / 10 for i in range(len(response)))
    return Transition(
        rollout_id=f"r-{attempt}",
        attempt_id=attempt,
        agent=agent,
        turn=turn,
        span_id=f"{turn:016x}",
        tokens=Tokens(tuple(prompt), tuple(response), logprobs),
        sampling={} if temperature is None else {"temperature": temperature},
        **{"policy": "p", "policy_version": 3, **other},
    )


class Groups(dict):
    def __missing__(self, rollout_id):
        return f"group of {rollout_id}"


def rows_of(transitions, advantages=None, **options):
    if advantages is None:
        advantages = np.arange(1.0, len(transitions) + 1)
    return make_rows(transitions, np.asarray(advantages, dtype=float), Groups(), **options)
