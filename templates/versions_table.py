"""The table of tested versions in the docs, written from the plugins' own files: `nox -s table`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reference/versions.md"
BEGIN = "<!-- versions: written by `nox -s table` -->"
END = "<!-- end of versions -->"
ORDER = ["oldest", "middle", "latest", "together"]  # add other names of legs here


def table(root: Path = ROOT) -> str:
    """Return the table: a row for each plugin, a column for each leg that any of them has."""
    tested = {}
    for path in sorted(root.glob("plugins/*/pyproject.toml")):
        tested[path.parent.name] = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["lightning"]["versions"]
    legs = sorted({leg for of in tested.values() for leg in of}, key=lambda leg: (ORDER.index(leg), leg))
    rows = [["plugin", *legs], ["---"] * (len(legs) + 1)]
    rows += [
        [f"[{name}](../../plugins/{name})", *(", ".join(map(_plain, of.get(leg, []))) for leg in legs)]
        for name, of in tested.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_table(text: str, root: Path = ROOT) -> str:
    """Return a text with the table between its markers.

    Raises:
        ValueError: the markers are missing.
    """
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"There is no {BEGIN} with {END} after it.")
    return f"{before}{BEGIN}\n{table(root)}\n{END}{after}"


def _plain(requirement: str) -> str:
    """Return a requirement for readers: ``autogen-ext[openai]==0.7.5`` becomes ``autogen-ext 0.7.5``."""
    name, version = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", requirement).groups()
    return f"{name} {version.removeprefix('==')}".strip()


if __name__ == "__main__":
    PAGE.write_text(write_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
