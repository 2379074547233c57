"""Three agents that answer questions with SQL: `writer` writes a query, `checker` judges it, `rewriter` writes another.

A plain program on the OpenAI client. The rewriter is asked where SQLite rejects the query or the checker says no.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import lightning_openai

lightning_openai.attach()

from database import QueryError, execute  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

import lightning_spans  # noqa: E402
from lightning_spans import agent  # noqa: E402

Rows: TypeAlias = list[str] | None  # None where SQLite did not take the query

# The question, an answer, an error that a wrong answer gave, and a wrong answer.
EXAMPLES = [
    (
        "Table city(name, state, population)\nHow many citys have state Ohio?",
        "SELECT count(*) FROM city WHERE state = 'Ohio'",
        "no such table: citys",
        "SELECT name FROM city",
    ),
    (
        "Table river(name, country, length)\nWhat is the name of rivers with length above 50?",
        "SELECT name FROM river WHERE length > 50",
        "no such column: title",
        "SELECT max(length) FROM river",
    ),
    (
        "Table lake(name, region, depth)\nWhat is the lowest depth?",
        "SELECT min(depth) FROM lake",
        "syntax error",
        "SELECT depth FROM lake",
    ),
]
DOUBT = "it answers another question"


async def ask(system: str, turns: list[tuple[str, str]], text: str, *, max_tokens: int) -> str:
    """Ask the model with examples as chat turns; the address and key come from the environment."""
    messages: list[Any] = [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": text})
    async with AsyncOpenAI(max_retries=2) as client:
        reply = await client.chat.completions.create(
            model=os.environ.get("SQL_MODEL", "policy"), messages=messages, max_tokens=max_tokens, stop=[";"]
        )
    return reply.choices[0].message.content or ""


async def writer(question: str) -> str:
    with agent("writer"):
        turns = [(question, f"{query};") for question, query, _, _ in EXAMPLES]
        return await ask("Write one SQLite query.", turns, question, max_tokens=40)


async def rewriter(question: str, problem: str) -> str:
    """The query that failed is not shown: a small model would copy it."""
    with agent("rewriter"):
        failed = "\nThe first query failed: "
        turns = [(f"{question}{failed}{error}", f"{query};") for question, query, error, _ in EXAMPLES]
        return await ask("Write one SQLite query.", turns, f"{question}{failed}{problem[:60]}", max_tokens=40)


async def checker(question: str, query: str) -> bool:
    """Whether the query answers the question. It is not trained."""
    with agent("checker"):
        turns = []
        for example, right, _, wrong in EXAMPLES[:2]:
            turns += [(f"{example}\n{right}", "yes"), (f"{example}\n{wrong}", "no")]
        verdict = await ask("Does the query answer the question?", turns, f"{question}\n{query}", max_tokens=3)
    return not verdict.strip().lower().startswith("no")


async def answer(question: str) -> tuple[Rows, Rows, bool]:
    """The rows of the writer's query, those of the rewriter's, and whether the rewriter was asked."""
    query = await writer(question)
    rows, problem = _rows(query, sqlite)
    if rows is not None and await checker(question, query.strip()):
        return rows, None, False
    again, _ = _rows(await rewriter(question, problem or DOUBT), execute)
    return rows, again, True


@lightning_spans.tool
def sqlite(query: str) -> list[str]:
    """Run the writer's query. What SQLite says of it is a span, a failed one where it refuses the query."""
    return execute(query)


def _rows(query: str, run: Callable[[str], list[str]]) -> tuple[Rows, str]:
    try:
        return run(query), ""
    except QueryError as error:
        return None, str(error)


async def run(task: dict[str, str]) -> dict[str, float]:
    """Run the program on a task. An agent that wrote a query earns 1 when it gives the rows of the right query."""
    first, second, rewritten = await answer(task["question"])
    right = execute(task["query"])
    earned = {"writer": float(first == right)}
    return {**earned, "rewriter": float(second == right)} if rewritten else earned


async def run_team(task: dict[str, str]) -> float:
    """Run the program on a task, with one reward for the team: whether the rows that it ends with are right."""
    first, second, rewritten = await answer(task["question"])
    return float((second if rewritten else first) == execute(task["query"]))


async def run_writer(task: dict[str, str]) -> float:
    """Run the writer alone on a task."""
    rows, _ = _rows(await writer(task["question"]), execute)
    return float(rows == execute(task["query"]))
