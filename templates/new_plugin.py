"""Make the folder and the test of a new plugin: `nox -s new -- NAME`, where NAME is the framework's distribution."""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parent / "plugin"
ROOT = TEMPLATE.parent.parent


def make(name: str, root: Path = ROOT) -> list[Path]:
    """Write `plugins/NAME` and `tests/plugins/test_NAME.py`, and give what was written.

    Raises:
        ValueError: the name is no distribution's, or the plugin is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"{name!r} is no name of a distribution: lower case letters, digits and single hyphens.")
    folder = root / "plugins" / name
    if folder.exists():
        raise ValueError(f"{folder} is there already.")
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        part = Path(_named(str(source.relative_to(TEMPLATE)), name))
        if source.is_dir() or "__pycache__" in part.parts:
            continue
        place = root / "tests" / "plugins" / part if part.name.startswith("test_") else folder / part
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_named(source.read_text(encoding="utf-8"), name), encoding="utf-8")
        written.append(place)
    return written


def _named(text: str, name: str) -> str:
    for placeholder, value in (
        ("new-framework", name),
        ("new_framework", name.replace("-", "_")),
        ("NewFramework", "".join(word.capitalize() for word in name.split("-"))),
    ):
        text = text.replace(placeholder, value)
    return text


def main(arguments: list[str]) -> None:
    """Make the plugin that the command line names, and say what comes next."""
    if len(arguments) != 1:
        sys.exit("Which framework? nox -s new -- NAME")
    try:
        written = make(arguments[0])
    except ValueError as error:
        sys.exit(str(error))
    print(*(path.relative_to(ROOT) for path in written), sep="\n")
    print(f"\nIt works with the framework in example.py: nox -s 'matrix({arguments[0]}-latest)' is green.")
    print("Now put yours in its place: docs/adding-a-framework.md.")


if __name__ == "__main__":
    main(sys.argv[1:])
