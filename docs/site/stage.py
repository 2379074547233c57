"""The pages of the site, put in one folder: those of docs/, and what else a reader of the site wants to find there."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
SNIPPET = re.compile(r'^( *)--8<-- "([^":]+)(?::([\w-]+))?"$', re.MULTILINE)
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
        text = FENCED.split(snippets(source.read_text(encoding="utf-8"), root))
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


def snippets(text: str, root: Path = ROOT) -> str:
    """Put the parts of files in the place of the lines that name them: `--8<-- "path"` or `--8<-- "path:part"`.

    A part stands between `# --8<-- [start:part]` and `# --8<-- [end:part]`.

    Raises:
        ValueError: there is no such file or part.
    """

    def taken(match: re.Match[str]) -> str:
        indent, path, part = match.groups()
        if not (root / path).is_file():
            raise ValueError(f"{match[0]}: there is no {path}.")
        found = (root / path).read_text(encoding="utf-8").rstrip()
        if part is not None:
            marks = rf"^\s*\S+ --8<-- \[start:{part}\]\n(.*?)\n\s*\S+ --8<-- \[end:{part}\]"
            inside = re.search(marks, found, re.DOTALL | re.MULTILINE)
            if inside is None:
                raise ValueError(f"{match[0]}: {path} has no such part.")
            found = textwrap.dedent(inside[1]).strip("\n")
        return textwrap.indent(found, indent)

    return SNIPPET.sub(taken, text)
