"""A program of one call: each rollout is one row, as plain verl counts them."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

import lightning_openai
from lightning_spans import agent

lightning_openai.attach()

# About as long as a tool's description and two examples.
PREAMBLE = "Work it out and write Answer: NUMBER. " * 24


async def run(task: dict[str, Any]) -> float:
    """Ask once, and be paid for digits."""
    messages = [{"role": "system", "content": PREAMBLE}, {"role": "user", "content": task["question"]}]
    async with AsyncOpenAI() as client:
        with agent("solver"):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=44)
    text = reply.choices[0].message.content or ""
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
