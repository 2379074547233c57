"""The pages of the site, put in one folder: those of docs/, and what else a reader of the site wants to find there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def pages(root: Path = ROOT) -> dict[Path, Path]:
    """Return where each file of the site comes from, by where it lies in it. Only what git would keep is taken."""
    docs = root / "docs"
    found = {
        path.relative_to(docs): path
        for path in sorted(docs.rglob("*"))
        if path.is_file() and path.relative_to(docs).parts[0] != "site"
    }
    for kind in ("plugins", "examples"):
        for readme in sorted(root.glob(f"{kind}/*/README.md")):
            found[Path(kind, f"{readme.parent.name}.md")] = readme
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        found[Path("project", f"{name.lower()}.md")] = root / f"{name}.md"
    return found


def stage(folder: Path, root: Path = ROOT) -> list[str]:
    """Copy the pages into a folder, with links that lead to where they lie there; one to another file becomes text.

    Returns:
        What is wrong: links to what is not there at all.
    """
    where = pages(root)
    staged = {source: place for place, source in where.items()}
    problems = []
    for place, source in where.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copy(source, target)
            continue
        text = FENCED.split(source.read_text(encoding="utf-8"))
        for at in range(0, len(text), 2):
            text[at], dead = _relink(text[at], source, place, staged)
            problems += [f"{source.relative_to(root)}: {link} is not there" for link in dead]
        target.write_text("".join(text), encoding="utf-8")
    return problems


def _relink(text: str, source: Path, place: Path, staged: dict[Path, Path]) -> tuple[str, list[str]]:
    dead = []

    def moved(match: re.Match[str]) -> str:
        said, link, anchor = match.groups()
        if re.match(r"[a-z]+:", link):
            return match[0]
        target = (source.parent / link).resolve()
        found = staged.get(target / "README.md") or staged.get(target)
        if found is not None:
            return f"[{said}]({os.path.relpath(found, place.parent)}{anchor})"
        if not target.exists():
            dead.append(link)
        return said  # a file of the repository, which readers of the site need not have

    return LINK.sub(moved, text), dead
