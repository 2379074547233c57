"""The habits of the project, where a test can hold them: links, versions, change notes, names in the docs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILT = {".nox", ".venv", "node_modules", "runs", "site"}
GENERATED = "<!-- generate: "  # the build of the site writes more there, and checks the links to it
PAGES = sorted(path for path in ROOT.rglob("*.md") if not BUILT & set(path.relative_to(ROOT).parts))
CURRENT = [path for path in PAGES if path.name != "CHANGELOG.md"]  # which tells of names as they were
CURRENT_IDS = [str(path.relative_to(ROOT)) for path in CURRENT]
PAGE_IDS = [str(path.relative_to(ROOT)) for path in PAGES]
DISTRIBUTIONS = [
    ROOT / "core",
    ROOT / "conformance",
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
    ROOT / "trainer",
]
KINDS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load("templates/release.py")


def project(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


VERSION = str(project(ROOT / "core")["version"])


def prose(text: str) -> str:
    """A page without its code blocks, in which brackets mean something else."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as the usual viewers make it."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def has_anchor(page: Path, anchor: str) -> bool:
    """Whether a page has a heading of that name, or may get it when it is built."""
    return anchor in anchors(page) or GENERATED in page.read_text(encoding="utf-8")


def dead_links(page: Path) -> list[str]:
    """Links of a page to files, or to headings in them, that are not there."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and not has_anchor(file, anchor)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading: with signs\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](gone.md) [c](other.md#a-heading-with-signs) [d](other.md#gone) [e](https://x.y/z)\n"
        "```\n[f](code.md)\n```\n![g](gone.png)\n"
    )
    assert dead_links(page) == ["gone.md", "other.md#gone", "gone.png"]


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_examples_that_read_data_say_where_it_comes_from() -> None:
    source = re.compile(r"\]\(https://github\.com/[\w.-]+/[\w.-]+\)\s+at (commit )?`[0-9a-f]{7}`")
    texts = {page: page.read_text(encoding="utf-8") for page in ROOT.glob("examples/*/README.md")}
    assert [page for page, text in texts.items() if "LIGHTNING_DATA" in text and not source.search(text)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/frameworks.md", "docs/how-to/install.md"])
def test_a_list_of_frameworks_has_every_plugin(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    plugins = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
    assert [name for name in plugins if not re.search(rf"plugins/{name}[/)`]", text)] == []


# A page names a module by its path from its package or from the root, or by its import path.
FILES = re.compile(r"`([\w./-]+\.(?:py|sh|yaml|yml))`")
MODULES = re.compile(r"`(lightning_\w+(?:\.\w+)+)(?:\(\))?`")
SOURCES = {path.parent.name: path.parent for path in ROOT.glob("*/**/src/*/py.typed") if ".nox" not in path.parts}
NOT_OURS = {"my_app.py", "my_rules.py"}  # the reader's own program


def git(*arguments: str) -> list[str]:
    """The files that git lists; without a checkout there is nothing to ask."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    done = subprocess.run(["git", "ls-files", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def unknown_names(text: str) -> list[str]:
    """Files and modules that a page names, and that are not there."""
    files = [f"/{path}" for path in git("-co", "--exclude-standard")]
    named = [name for name in FILES.findall(text) if name not in NOT_OURS]
    gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    return gone + [name for name in MODULES.findall(text) if not is_module(name)]


def is_module(name: str) -> bool:
    """Whether a dotted name is a module of ours, or a name that stands in one."""
    package, *parts = name.split(".")
    if package not in SOURCES:
        return False
    at = SOURCES[package]
    while parts and (at / parts[0]).is_dir():
        at = at / parts.pop(0)
    if parts and (at / f"{parts[0]}.py").exists():
        at = at / f"{parts.pop(0)}.py"
    home = at if at.suffix else at / "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", home.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("page", CURRENT, ids=CURRENT_IDS)
def test_every_file_and_module_that_a_page_names_is_there(page: Path) -> None:
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def test_names_that_are_gone_are_found() -> None:
    text = "`lightning_spans.adapter.trace` `lightning_spans.gone` `gone.py` `adapter/trace.py` `lightning_spans.Trace`"
    assert unknown_names(text) == ["gone.py", "lightning_spans.gone"]


def test_every_page_that_code_sends_a_reader_to_is_there() -> None:
    named = {
        name
        for path in git("-co", "--exclude-standard", "*.py", "*.toml", "*.yml", "*.md")
        if path != "CHANGELOG.md"  # which tells of pages as they were
        for name in re.findall(
            r"(?<![\w/])docs/[\w/-]+\.(?:md|yaml|sh|png)\b", (ROOT / path).read_text(encoding="utf-8")
        )
    }
    assert "docs/explanation/architecture.md" in named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_page_of_the_docs_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    }
    assert [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.resolve() not in linked] == []


@pytest.mark.parametrize("path", release.projects(), ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_every_distribution_has_the_one_version(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tomllib.loads(text)["project"]["version"] == VERSION
    pins = re.findall(rf'{release.OURS}([^"]*)"', text)
    assert set(pins) <= {VERSION}
    assert release.with_version(text, VERSION) == text


def test_a_release_writes_the_version_everywhere() -> None:
    text = 'version = "0.1.0"\ndependencies = ["lightning-spans[postgres]=={0}", "x==0.1.0", "lightning-openai=={0}"]\n'
    made = release.with_version(text.format("0.1.0"), "2.3.4")
    assert made == text.format("2.3.4").replace('version = "0.1.0"', 'version = "2.3.4"')


def test_no_file_of_a_package_is_ignored() -> None:
    sources = [str(folder.relative_to(ROOT) / "src") for folder in DISTRIBUTIONS]
    ignored = git("-ci", "--exclude-standard", *sources) + git("-oi", "--exclude-standard", *sources)
    assert [path for path in ignored if "__pycache__" not in path and ".egg-info" not in path] == []


def test_the_changelog_begins_with_the_version() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections[0] == VERSION
    assert len(sections) == len(set(sections))


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_a_distribution_says_what_an_index_shows(folder: Path) -> None:
    told = project(folder)
    assert "Lightning-RL" in str(told["description"])
    assert told["authors"] == [{"name": "the Lightning-RL contributors"}]
    assert {"keywords", "classifiers", "license", "requires-python"} <= set(told)
    assert (folder / str(told["readme"])).stat().st_size
    for name in told.get("license-files", ()):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()


def wrongly_named(folder: Path) -> list[str]:
    """Files among the change notes that towncrier would leave lying, or would take for another kind."""
    pattern = re.compile(rf"\+[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")
    names = {path.name for path in folder.iterdir()} - {"README.md"}
    return sorted(name for name in names if not pattern.fullmatch(name))


def test_every_change_note_has_a_name_that_is_gathered_and_a_text() -> None:
    assert wrongly_named(ROOT / "changelog.d") == []
    assert all(path.read_text(encoding="utf-8").strip() for path in (ROOT / "changelog.d").iterdir())


def test_change_notes_that_would_be_lost_are_found(tmp_path: Path) -> None:
    for name in ("+good-one.fixed.md", "+Bad.fixed.md", "streams.fixed.md", "+streams.mended.md", "+streams.fixed.txt"):
        (tmp_path / name).touch()
    assert wrongly_named(tmp_path) == ["+Bad.fixed.md", "+streams.fixed.txt", "+streams.mended.md", "streams.fixed.md"]


def test_every_decision_is_in_the_index_and_says_why() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in sorted(set(folder.glob("*.md")) - {folder / "README.md"}):
        assert f"({page.name})" in index, f"{page.name} is not in the index"
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], page.name


def test_pre_commit_has_the_ruff_of_the_sessions() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    wanted = re.search(r'^RUFF = "(.*)"$', noxfile, flags=re.MULTILINE)
    assert wanted is not None
    named = re.findall(r'\["(ruff==.*)"\]', (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert named == [wanted[1]] * 2
