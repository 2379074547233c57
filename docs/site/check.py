"""What is asked of a built site: every link and anchor leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


def listed(nav: object) -> list[tuple[str, str]]:
    """Return the pages of a navigation in order, each with the section that it is in."""
    return list(_listed(nav, ""))


def _listed(nav: object, section: str) -> Iterator[tuple[str, str]]:
    if isinstance(nav, str):
        yield nav, section
    elif isinstance(nav, list):
        for part in nav:
            yield from _listed(part, section)
    elif isinstance(nav, dict):
        for title, part in nav.items():
            yield from _listed(part, section or title)


def unlisted(pages: Path, nav: list[tuple[str, str]]) -> list[str]:
    """Return the pages that are not in the navigation, and what is in it and no page."""
    there = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    named = [name for name, _ in nav]
    twice = {name for name in named if named.count(name) > 1}
    return [
        *(f"{name} is not in the navigation: docs/site/mkdocs.yml" for name in sorted(there - set(named))),
        *(f"docs/site/mkdocs.yml names {name}, which is not there" for name in sorted(set(named) - there)),
        *(f"docs/site/mkdocs.yml names {name} twice" for name in sorted(twice)),
    ]


class _Page(HTMLParser):
    """What a page has and asks for.

    Attributes:
        ids: its anchors.
        links: where its links lead.
        loads: what a browser fetches to show it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADS and LOADS[tag] in values and values.get("rel") not in {"canonical", "prev", "next"}:
            self.loads.append(values[LOADS[tag]])


def site(folder: Path) -> list[str]:
    """Return what is wrong with a built site."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    problems = [f"{folder} has no {name}" for name in ("search.json", "llms.txt") if not list(folder.rglob(name))]
    problems += [
        f"{path.name} has unfilled lines (:::)" for path in folder.glob("*.txt") if "\n:::" in path.read_text()
    ]
    for path, page in pages.items():
        name = path.relative_to(folder)
        problems += [f"{name} loads {link} from elsewhere" for link in page.loads if urlsplit(link).netloc]
        if path.name == "404.html":
            continue
        problems += [f"{name}: {link} leads nowhere" for link in [*page.links, *page.loads] if _dead(link, path, pages)]
    return problems


def _dead(link: str, path: Path, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return True
    anchor = unquote(parts.fragment)
    return bool(anchor) and target in pages and anchor not in pages[target].ids and anchor != "__top"
