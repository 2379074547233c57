"""The result of a search: a file for `attach(prompts=FILE)`, and a diff for people."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_spans.record.prompts import FORMAT
from lightning_trainer.report.metrics import write_atomically


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff of the prompts, agent by agent; empty if none changed."""
    parts = []
    for agent, old in before.items():
        lines = difflib.unified_diff(
            old.splitlines(), after[agent].splitlines(), f"{agent} (before)", f"{agent} (after)", lineterm=""
        )
        parts += list(lines)
    return "".join(f"{line}\n" for line in parts)


def write(path: Path, before: Mapping[str, str], after: Mapping[str, str], facts: Mapping[str, Any]) -> Path:
    """Write the file, and the diff next to it; return the diff's path."""
    changed = {
        agent: {"before": old.split("\n"), "after": after[agent].split("\n")}
        for agent, old in before.items()
        if after[agent] != old
    }
    text = json.dumps({"format": FORMAT, **facts, "agents": changed}, indent=2, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{text}\n".encode())
    beside = path.with_name(f"{path.name}.diff")
    write_atomically(beside, diff(before, after).encode())
    return beside
