"""Three small teams on text to SQL: writer, checker and rewriter; an orchestrator with workers; three voters.

Plain programs on the OpenAI client. Each has one reward for the whole team, so nobody says which agent earned it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "text_to_sql"))

from agent import EXAMPLES, ask, run_team  # attaches, too
from database import QueryError, execute

from lightning_spans import agent

rewriters = run_team  # writer, checker and rewriter: the program of the example text_to_sql
WORKERS = ("counter", "lister")  # whoever counts or compares, and whoever lists rows
VOTERS = ("first", "second", "third")


async def query_of(name: str, question: str) -> str:
    """Have an agent write a query."""
    with agent(name):
        turns = [(example, f"{query};") for example, query, _, _ in EXAMPLES]
        return await ask("Write one SQLite query.", turns, question, max_tokens=40)


def rows_of(query: str) -> tuple[str, ...] | None:
    """Run a query; None where SQLite rejects it."""
    try:
        return tuple(execute(query))
    except QueryError:
        return None


async def orchestra(task: dict[str, str]) -> float:
    """The orchestrator names the worker that writes the query."""
    with agent("orchestrator"):
        turns = [(example, WORKERS[query.startswith("SELECT name")]) for example, query, _, _ in EXAMPLES]
        named = await ask("Who answers the question, counter or lister?", turns, task["question"], max_tokens=4)
    worker = WORKERS["list" in named.lower()]
    return float(rows_of(await query_of(worker, task["question"])) == tuple(execute(task["query"])))


async def voters(task: dict[str, str]) -> float:
    """Three agents write a query each, and the rows that most of them find count. Rejected queries have no vote."""
    found = [rows_of(query) for query in await asyncio.gather(*(query_of(name, task["question"]) for name in VOTERS))]
    votes = Counter(rows for rows in found if rows is not None)
    return float(bool(votes) and votes.most_common(1)[0][0] == tuple(execute(task["query"])))
