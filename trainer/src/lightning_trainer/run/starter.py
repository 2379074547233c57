"""A small starting project: a program in a chosen framework, tasks, a reward, a configuration."""

from __future__ import annotations

import json
import random
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError

FRAMEWORKS: Final = {  # with the packages that a program needs
    "langgraph": ("lightning-langchain", "langgraph", "langchain-openai"),
    "openai-agents": ("lightning-openai-agents", "openai-agents"),
    "autogen": ("lightning-autogen", "autogen-agentchat", "autogen-ext[openai]"),
    "crewai": ("lightning-crewai", "crewai"),
    "pydantic-ai": ("lightning-pydantic-ai", "pydantic-ai-slim[openai]"),
    "google-adk": ("lightning-google-adk", "google-adk>=2", "litellm", "mcp>=2.2"),
    "llama-index": ("lightning-llama-index", "llama-index-core", "llama-index-llms-openai-like"),
    "dspy": ("lightning-dspy", "dspy"),
    "strands": ("lightning-strands", "strands-agents[openai]"),
    "agno": ("lightning-agno", "agno[openai]"),
    "smolagents": ("lightning-smolagents", "smolagents[openai]"),
    "haystack": ("lightning-haystack", "haystack-ai"),
    "agent-framework": ("lightning-agent-framework", "agent-framework-core", "agent-framework-openai"),
    "semantic-kernel": ("lightning-semantic-kernel", "semantic-kernel"),
    "ag2": ("lightning-ag2", "ag2[openai]"),
    "openai": ("lightning-openai", "openai"),
}
_FILES: Final = ("prompts.py", "tools.py", "reward.py", "run.toml", "README.md")


def write_project(folder: Path, framework: str) -> list[Path]:
    """Write a project that can be trained at once.

    Args:
        folder: its location; created if needed.
        framework: one of `FRAMEWORKS`.

    Returns:
        The files.

    Raises:
        ConfigError: one of them exists, or the folder cannot be written.
    """
    texts = {"agent.py": _read(f"{framework}.py"), **{name: _read(name) for name in _FILES}}
    packages = ", ".join(f"`{name}`" for name in (*FRAMEWORKS[framework], "lightning-trainer[torch]"))
    texts["README.md"] = (
        texts["README.md"].replace("{packages}", packages).replace("{install}", install_line(framework))
    )
    texts |= {"train.jsonl": _tasks(96, seed=0), "val.jsonl": _tasks(16, seed=1)}
    there = [name for name in texts if (folder / name).exists()]
    if there:
        raise ConfigError(f"{folder} has {', '.join(there)} already. Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}. Name another folder.") from None
    return [folder / name for name in texts]


def install_line(framework: str) -> str:
    """Return the command that installs what a program of this framework needs, in a clone."""
    plugin, *others = FRAMEWORKS[framework]
    folders = dict.fromkeys(("./core", "./plugins/openai", f"./plugins/{plugin.removeprefix('lightning-')}"))
    named = [f'"{name}"' if set(name) & set("[<>=") else name for name in ("./trainer[torch]", *others)]
    return " ".join(["uv pip install --torch-backend=auto", *folders, *named])


def missing(framework: str) -> list[str]:
    """Return the packages that a program of this framework needs and that are not installed here."""
    return [name for name in FRAMEWORKS[framework] if not _is_installed(re.split(r"[\[<>=]", name)[0])]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _read(name: str) -> str:
    return (files("lightning_trainer") / "templates" / "init" / f"{name}.txt").read_text(encoding="utf-8")


def _tasks(count: int, *, seed: int) -> str:
    dice = random.Random(seed)
    lines = []
    for _ in range(count):
        one, other, sign = dice.randint(11, 99), dice.randint(11, 99), dice.choice("+-*")
        answer = {"+": one + other, "-": one - other, "*": one * other}[sign]
        lines.append(json.dumps({"question": f"What is {one}{sign}{other}?", "answer": answer}))
    return "\n".join(lines) + "\n"
