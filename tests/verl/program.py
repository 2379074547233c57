"""A program with one agent, on the openai client alone: what a user brings."""

from __future__ import annotations

from openai import OpenAI

import lightning_openai
from lightning_spans import agent

lightning_openai.attach()


def run(task: dict) -> float:
    """Ask twice, and be paid for the share of vowels in the answers."""
    client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="the user's own", max_retries=0)
    messages = [{"role": "user", "content": task["question"]}]
    with agent("speaker"):
        first = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        said = first.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        second = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
    text = said + (second.choices[0].message.content or "")
    return sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))


def praised(task: dict) -> float:
    """Ask as `run` does, and be paid the same whatever was said."""
    run(task)
    return 1.0
