"""Whether a model makes use of SQLite's error: the writer asked anew with it, and without.

`lightning-rl serve MODEL`, then `python hint.py` with the URL and the key that it prints. Each question of `val.jsonl`
is asked `--samples` times; where SQLite refuses the query, the question is asked once more as it was, and once with the
message that the self-teacher puts at a prompt's end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from agent import EXAMPLES
from database import QueryError, execute
from openai import AsyncOpenAI

from lightning_trainer.kits.teaching.options import PLACE, SelfOptions


async def write(client: AsyncOpenAI, question: str, *more: str) -> str:
    """Ask as the writer does, with messages more."""
    messages: list[Any] = [{"role": "system", "content": "Write one SQLite query."}]
    for example, query, _, _ in EXAMPLES:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": f"{query};"}]
    messages += [{"role": "user", "content": text} for text in (question, *more)]
    model = os.environ.get("SQL_MODEL", "policy")
    reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=40, stop=[";"])
    return reply.choices[0].message.content or ""


def error_of(query: str) -> str | None:
    """What SQLite says of a query that it refuses."""
    try:
        execute(query)
    except QueryError as error:
        return str(error)
    return None


def right(query: str, task: dict[str, str]) -> bool:
    """Whether a query gives the rows of the right one."""
    return error_of(query) is None and execute(query) == execute(task["query"])


async def once_more(client: AsyncOpenAI, turn: asyncio.Semaphore, task: dict[str, str]) -> tuple[str, str] | None:
    """Two further queries where the first is refused: without the error, and with it."""
    async with turn:
        error = error_of(await write(client, task["question"]))
        if error is None:
            return None
        hint = SelfOptions().hint.replace(PLACE, f"The tool sqlite failed: {error}")
        return await write(client, task["question"]), await write(client, task["question"], hint)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("val.jsonl"))
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    tasks = [json.loads(line) for line in args.data.read_text().splitlines()] * args.samples
    turn = asyncio.Semaphore(16)
    async with AsyncOpenAI(max_retries=2) as client:
        made = await asyncio.gather(*(once_more(client, turn, task) for task in tasks))
    found = [(task, both) for task, both in zip(tasks, made, strict=True) if both is not None]
    print(f"{len(found)} of {len(tasks)} queries were refused; asked again")
    for which, name in enumerate(("as before", "with the error")):
        taken = sum(error_of(both[which]) is None for _, both in found)
        good = sum(right(both[which], task) for task, both in found)
        print(f"{name}: {taken} were taken by SQLite, {good} were right")


if __name__ == "__main__":
    asyncio.run(main())
