"""Set one version for all distributions, and gather the changelog: `nox -s release -- 0.2.0`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# our distributions' requirements of each other, in the same version
OURS = r'"lightning-(?:spans|openai)(?:\[\w+\])?=='


def projects(root: Path = ROOT) -> list[Path]:
    """Return the pyproject of every distribution, and of the template for new ones."""
    return sorted(
        path
        for folder in ("core", "conformance", "plugins/*", "trainer", "templates/plugin")
        for path in root.glob(f"{folder}/pyproject.toml")
    )


def with_version(text: str, version: str) -> str:
    """Return a pyproject's text with another version: its own, and that of its requirements among our distributions."""
    text = re.sub(r'(?m)^version = "[^"]*"$', f'version = "{version}"', text, count=1)
    return re.sub(rf'({OURS})[^"]*"', rf'\g<1>{version}"', text)


def main(arguments: list[str]) -> None:
    """Write the version that the command line names, and gather the change notes."""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        sys.exit("Which version? nox -s release -- MAJOR.MINOR.PATCH")
    for path in projects():
        path.write_text(with_version(path.read_text(encoding="utf-8"), arguments[0]), encoding="utf-8")
    gather = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", arguments[0]]
    subprocess.run(gather, check=True, cwd=ROOT)


if __name__ == "__main__":
    main(sys.argv[1:])
