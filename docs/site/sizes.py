"""The sizes in docs/decisions/size.md: `nox -s table` writes them, a test fails when one is 10 % off.

A row of the table starts with the packages that it counts: ``core: `record` ``, ``trainer: `rl` `` or `` `plugins` ``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/decisions/size.md"
HOMES = {"core": "core/src/lightning_spans", "trainer": "trainer/src/lightning_trainer", None: ""}
ROW = re.compile(r"^\| (?:(?P<home>core|trainer): )?(?P<names>`[^|]*`) \| (?P<lines>[\d,]+) \|", re.MULTILINE)


def count(home: str | None, names: str) -> int:
    """Return the lines of Python in the packages of a row, rounded to hundreds.

    Raises:
        ValueError: one of them is not a folder.
    """
    lines = 0
    for name in re.findall(r"`([^`]+)`", names):
        folder = ROOT / HOMES[home] / name
        if not folder.is_dir():
            raise ValueError(f"{PAGE.name} names {name!r}, which is not a folder.")
        sources = folder.glob("**/src/**/*.py") if home is None else folder.rglob("*.py")
        lines += sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    return round(lines, -2)


def rows(text: str) -> list[tuple[str, int, int]]:
    """Return each row's packages, the lines that the page states and those that there are."""
    return [
        (row["names"], int(row["lines"].replace(",", "")), count(row["home"], row["names"]))
        for row in ROW.finditer(text)
    ]


def fill(text: str) -> str:
    """Return the page with today's sizes."""

    def write(row: re.Match[str]) -> str:
        return row[0].replace(f"| {row['lines']} |", f"| {count(row['home'], row['names']):,} |")

    return ROW.sub(write, text)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
