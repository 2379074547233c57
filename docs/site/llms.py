"""`llms.txt` (llmstxt.org) and the pages as Markdown beside it, for programs that read the docs."""

from __future__ import annotations

import re
from pathlib import Path

import reference

NAME = re.compile(r"^::: (\S+)\n(?:    .*\n)*", re.MULTILINE)  # where mkdocstrings describes a name
ABOUT = """\
# Lightning-RL

> Train the agents of a program you already have, by reinforcement learning, agent by agent, by name. One line attaches
> to LangChain, LangGraph, the OpenAI Agents SDK, AutoGen, CrewAI, Pydantic AI, Google ADK, LlamaIndex,
> DSPy, Strands Agents, Agno, smolagents, Haystack or the openai client; `lightning-rl` trains, evaluates and serves.

`llms-full.txt` has all pages in one file.
"""


def write(pages: Path, nav: list[tuple[str, str]], site: Path) -> None:
    """Write the list of pages, each page's Markdown, and all of it in one file.

    Args:
        pages: the folder of the pages' sources.
        nav: the pages in order, each with its section.
        site: the folder of the built site.
    """
    lines, whole, last = [ABOUT], [ABOUT], ""
    for name, section in nav:
        text = NAME.sub(lambda mark: reference.describe(mark[1]), (pages / name).read_text(encoding="utf-8"))
        if section != last:
            lines.append(f"\n## {section}\n")
            last = section
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        lines.append(f"- [{title(text)}]({name}){summary(text)}")
        whole.append(f"\n\n<!-- {name} -->\n\n{text}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("".join(whole), encoding="utf-8")


def title(text: str) -> str:
    """Return a page's first heading."""
    found = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    return re.sub(r"[`\[\]]", "", found[1]) if found else "Lightning-RL"


def summary(text: str) -> str:
    """Return the first sentence of a page after a colon, where it begins with one."""
    found = re.search(r"^# .+\n+([A-Z][^\n]*(?:\n[^\n#`|<-][^\n]*)*)", text, flags=re.MULTILINE)
    if found is None:
        return ""
    said = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(found[1].split()))
    return f": {re.split(r'(?<=[.:]) ', said, maxsplit=1)[0].rstrip(':')}"
