"""Transitions to rows: how much any-branch merging saves, and what it costs."""

from __future__ import annotations

import random

import numpy as np
from figures import Figure, choose_size, measure_in_rounds

from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.rows import make_rows

ATTEMPTS, AGENTS, TURNS = choose_size(64, 4), 3, 10
SYSTEM, REPLY, OBSERVATION = 300, 60, 40  # tokens


def measure() -> list[Figure]:
    calls = [call for attempt in range(ATTEMPTS) for call in interleaved_agents(attempt)]
    advantages, groups = np.ones(len(calls)), {call.rollout_id: "g" for call in calls}
    _, account = make_rows(calls, advantages, groups)
    seconds = measure_in_rounds({"rows": lambda: make_rows(calls, advantages, groups)}, rounds=5)["rows"]
    return [
        Figure(
            what=f"tokens saved, {AGENTS} interleaved agents, {TURNS} turns",
            value=account.tokens_in_calls / account.tokens_in_rows,
            unit="x fewer",
            goal=6.1,
            more_is_better=True,
            others="1.0x (merging onto the previous call only); 7.2x is a trie's limit",
            note=f"{account.seen} calls in {account.rows} rows; system prompt {SYSTEM} tokens, reply {REPLY}",
        ),
        Figure(
            what="rows from transitions",
            value=account.tokens_in_calls / seconds,
            unit="tokens/s",
            note=f"{1e6 * seconds / len(calls):.0f} µs CPU a call",
        ),
    ]


def interleaved_agents(attempt: int) -> list[Transition]:
    """Each agent goes on with its own conversation, in turns with the others."""
    draw = random.Random(attempt).randrange
    history = [[draw(50_000) for _ in range(SYSTEM)] for _ in range(AGENTS)]
    calls = []
    for turn in range(TURNS * AGENTS):
        agent = turn % AGENTS
        reply = tuple(draw(50_000) for _ in range(REPLY))
        calls.append(
            Transition(
                rollout_id=f"r{attempt}",
                attempt_id=f"a{attempt}",
                agent=f"agent-{agent}",
                turn=turn,
                span_id=f"{turn:016x}",
                tokens=Tokens(tuple(history[agent]), reply, (-0.5,) * REPLY),
            )
        )
        history[agent] += [*reply, *(draw(50_000) for _ in range(OBSERVATION))]
    return calls
