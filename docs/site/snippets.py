"""Programs that a page shows, copied from the files that are tested: `nox -s table` writes them, a test compares.

A page names them above the code block: `<!-- snippet: tests/docs/cookbook.py:exact -->`. Several parts stand in one
block with an empty line between. A part of a file is between `# --8<-- [start:NAME]` and `# --8<-- [end:NAME]`.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?P<indent> *)<!-- snippet: (?P<sources>[^>]+?) -->\n(?P<open> *```[^\n]*\n)(?P<code>.*?)(?P<close>^ *```$)",
    re.DOTALL | re.MULTILINE,
)


def fill(text: str, root: Path = ROOT) -> str:
    """Return a page with the code of each named snippet as it is in its file now.

    Raises:
        ValueError: there is no such file or part.
    """

    def write(block: re.Match[str]) -> str:
        parts = [read(source, root) for source in block["sources"].split()]
        code = textwrap.indent("\n\n".join(parts), block["indent"])
        return f"{block['indent']}<!-- snippet: {block['sources']} -->\n{block['open']}{code}\n{block['close']}"

    return BLOCK.sub(write, text)


def named(text: str) -> list[str]:
    """Return the sources of a page's snippets, in order."""
    return [source for block in BLOCK.finditer(text) for source in block["sources"].split()]


def read(source: str, root: Path = ROOT) -> str:
    """Return a file, or the part of it that ``path:part`` names.

    Raises:
        ValueError: there is no such file or part.
    """
    path, _, part = source.partition(":")
    if not (root / path).is_file():
        raise ValueError(f"The snippet {source!r} names {path!r}, which is not a file of the project.")
    text = (root / path).read_text(encoding="utf-8").rstrip()
    if not part:
        return text
    marks = rf"^\s*\S+ --8<-- \[start:{part}\]\n(.*?)\n\s*\S+ --8<-- \[end:{part}\]"
    inside = re.search(marks, text, re.DOTALL | re.MULTILINE)
    if inside is None:
        raise ValueError(f"The snippet {source!r} names a part that {path!r} does not have.")
    return textwrap.dedent(inside[1]).strip("\n")


def main() -> None:
    """Write the snippets of every page anew."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
