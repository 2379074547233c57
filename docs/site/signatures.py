"""Signatures on the pages of the API: `nox -s table` writes them for readers of the repository.

The site shows each name with its docstring in their place. Both are read from the sources, which are not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import reference
from stage import ROOT

PAGES: Final = ROOT / "docs/reference/api"
WIDTH: Final = 100


def fill(text: str) -> str:
    """Return a page of the API with the signatures of each module that it lists, as they are now."""
    text = reference.without_signatures(text)

    def written(mark: re.Match[str]) -> str:
        if mark[1] != "api":
            return mark[0]
        parts = [_module(path) for path in mark[2].split()]
        return "\n\n".join([mark[0], reference.WRITTEN, *parts, reference.END])

    return reference.MARK.sub(written, text)


def stale() -> list[str]:
    """Return the pages whose signatures are not those of the sources."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
    return [str(page.relative_to(ROOT)) for page, text in texts.items() if fill(text) != text]


def _module(path: str) -> str:
    own, elsewhere = [], []
    for name, thing in reference.public(path).items():
        same_package = thing.path.partition(".")[0] == path.partition(".")[0]
        (own if same_package else elsewhere).append((name, thing))
    code = [f"from lightning_spans import {', '.join(name for name, _ in elsewhere)}"] if elsewhere else []
    code += [_name(thing) for _, thing in own]
    return "\n\n".join([f"**`{path}`**", "```python", *code]).replace("```python\n\n", "```python\n") + "\n```"


def _name(thing: Any) -> str:
    lines = [line for member in _members(thing) for line in member.splitlines()]
    return f"# {_summary(thing)}\n{_wrap(reference.signature(thing))}" + "".join(f"\n    {line}" for line in lines)


def _members(thing: Any) -> Iterator[str]:
    """Yield the public fields and methods of a class."""
    for name, member in thing.members.items() if thing.is_class else ():
        if reference.is_method(member) and name != "__init__":
            yield _wrap(reference.signature(member))
        elif not member.is_alias and member.is_attribute and member.annotation and name[0] != "_":
            yield f"{name}: {member.annotation}"


def _summary(thing: Any) -> str:
    return str(thing.docstring.value).partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _wrap(signature: str) -> str:
    """Write one parameter on each line if the signature is too long for one."""
    if len(signature) <= WIDTH:
        return signature
    start, inner, end = _split(signature)
    return "\n".join([start, *(f"    {parameter}," for parameter in _parameters(inner)), end])


def _split(signature: str) -> tuple[str, str, str]:
    """Cut a signature at the brackets of its parameters."""
    depth, opened = 0, signature.index("(")
    for at in range(opened, len(signature)):
        depth += {"(": 1, ")": -1}.get(signature[at], 0)
        if not depth:
            return signature[: opened + 1], signature[opened + 1 : at], signature[at:]
    raise ValueError(f"{signature!r} has no closing bracket.")


def _parameters(inner: str) -> Iterator[str]:
    depth = start = 0
    for at, character in enumerate(inner):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            yield inner[start:at].strip()
            start = at + 1
    yield inner[start:].strip()


def main() -> None:
    """Write the signatures of every page."""
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
