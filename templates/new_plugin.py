"""Create the folder and the test of a new plugin: `nox -s new -- NAME ["Its Name"]`.

NAME is the framework's distribution. Without a second argument, its display name is made from NAME.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parent / "plugin"
ROOT = TEMPLATE.parent.parent
# The places that list every plugin: tests/project/test_plugin_folders.py says which of them lacks one.
LISTS = (
    "README.md", "docs/how-to/frameworks.md", "docs/how-to/install.md", "docs/reference/api/plugins.md",
    "docs/site/mkdocs.yml", "pyproject.toml",
)  # fmt: skip


def make(name: str, root: Path = ROOT, title: str | None = None) -> list[Path]:
    """Write `plugins/NAME` and `tests/plugins/test_NAME.py`, and return what was written.

    Args:
        name: the framework's distribution.
        root: contains the folder `plugins`.
        title: the framework's display name.

    Raises:
        ValueError: the name is not a distribution's, or the plugin exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"{name!r} is no name of a distribution: lower case letters, digits and single hyphens.")
    folder = root / "plugins" / name
    if folder.exists():
        raise ValueError(f"{folder} is there already.")
    title = title or "".join(word.capitalize() for word in name.split("-"))
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        part = Path(_fill_names(str(source.relative_to(TEMPLATE)), name, title))
        if source.is_dir() or "__pycache__" in part.parts:
            continue
        place = root / "tests" / "plugins" / part if part.name.startswith("test_") else folder / part
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_fill_names(source.read_text(encoding="utf-8"), name, title), encoding="utf-8")
        written.append(place)
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    return [*written, folder / "LICENSE"]


def _fill_names(text: str, name: str, title: str) -> str:
    for placeholder, value in (
        ("new-framework", name),
        ("new_framework", name.replace("-", "_")),
        ("New Framework", title),  # in prose
        ("NewFramework", re.sub(r"\W", "", title)),  # in the names of classes
    ):
        text = text.replace(placeholder, value)
    return text


def main(arguments: list[str]) -> None:
    """Create the plugin that the command line names, and print the next steps."""
    if len(arguments) not in (1, 2):
        sys.exit('Which framework? nox -s new -- NAME ["Its Name"]')
    try:
        written = make(arguments[0], title=arguments[1] if len(arguments) == 2 else None)
    except ValueError as error:
        sys.exit(str(error))
    print(*(path.relative_to(ROOT) for path in written), sep="\n")
    print(f"\nIt works with the framework in example.py: nox -s 'matrix({arguments[0]}-latest)' is green.")
    print("Now put yours in its place: docs/how-to/adding-a-framework.md. Then name it in:", *LISTS, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
