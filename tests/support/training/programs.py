"""Programs that runs train, written into the folder of a test together with their tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

# No model is at this address: calls are answered only if they go to the gateway.
CLIENT = """
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)
"""
SAY = f"""{CLIENT.replace("OpenAI(", "AsyncOpenAI(")}
async def say(name, text, most=5):
    with agent(name):
        reply = await client.chat.completions.create(
            model="gpt-9", max_tokens=most, messages=[{{"role": "user", "content": text}}]
        )
    return reply.choices[0].message.content or ""

def letters(text):
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5
"""


def put_programs(folder: Path, tasks: int | Iterable[Mapping[str, Any]], **programs: str) -> None:
    """Write programs by the names of their modules, and tasks, or so many that ask for a number."""
    rows = [{"q": f"say {n}"} for n in range(tasks)] if isinstance(tasks, int) else tasks
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)


def folder_with(tasks: int | Iterable[Mapping[str, Any]], **programs: str) -> Any:
    """Return a fixture: the test's working folder, with programs and tasks."""

    @pytest.fixture
    def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        put_programs(tmp_path, tasks, **programs)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return folder
