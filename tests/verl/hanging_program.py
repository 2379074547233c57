"""The program of `program.py`, hanging for ever on one task."""

from __future__ import annotations

import asyncio

import program


async def run(task: dict) -> float:
    if task["question"] == "Say 3":
        await asyncio.Event().wait()
    return await asyncio.to_thread(program.run, task)
