"""What the pages of the docs show a reader to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]


def blocks(page: Path) -> list[list[str]]:
    """The commands of each console block of a page, in order; a line that ends with a backslash goes on."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^ *```console\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return [list(_commands(block)) for block in found]


def _commands(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("$ "):
            yield re.split(r"\s{2,}# ", line.lstrip()[2:])[0].strip()


def calls_of(program: str, line: str) -> list[str] | None:
    """The arguments of a command line that calls a program; None for another, or one that is cut short with dots."""
    if "..." in line or "[" in line:
        return None
    words = shlex.split(line.partition(" > ")[0].removesuffix("&"), comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    return words[1:] if words[:1] == [program] else None
