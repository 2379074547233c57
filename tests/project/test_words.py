"""Plain English: phrases that nobody who knows the field would write stay out of docs, help, errors and the viewer."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from lightning_trainer.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]
# Each with what to write instead.
PHRASES = {
    r"for from": "because, or two sentences",
    r"(?:go|goes|going|went|gone) on from": "continue, resume",
    r"go(?:es)? on(?! (?:and|with)\b)": "continue",
    r"all alike": "identical; no signal",
    r"(?:what|who) answers": "the model, the policy, the endpoint",
    r"(?:is|are|was|were|be|been) drawn": "sampled",
    r"draws": "samples",
    r"(?:is|are|was|were|be|been) told": "reports, logs, prints; gets",
    r"tells? of": "describe, report",
    r"(?:its|their|the) longest": "truncated at `max_tokens`",
    r"gone otherwise": "changed",
    r"(?:is|are) (?:not )?done here": "is (not) supported",
    r"of whom": "name the noun",
    r"the own": "its own, the agent's own",
    r"no folder of": "is not a ... folder",
    r"[,;] else[.;,]": "otherwise; by default",
    r"(?:is|are) waited for": "wait for",
    r"what (?:came|becomes|became|comes) of": "result",
    r"stands? (?:there|here|beside|behind|above|under|in|at|on|below)": "is, is listed",
    r"shared out": "assigned",
    r"kept as (?:it is|they are)": "unchanged, frozen",
    r"what (?:was|is) asked for": "requested",
    r"in turns?": "alternating",
    r"beside": "next to, compared with",
    r"lessons?": "training examples",
    r"(?:the|this|a) (?:house|room|furniture)": "package, module, layer",
    r"(?:the|trainer's|core's) floors?": "layers",
    r"by the clock": "wall time",
    r"in vain": "without effect",
    r"likelier": "more likely",
    r"(?<!there )is no (?!longer|more|need|way|better|worse|less|faster|slower|different|reason)[a-z]": "is not a",
    r"of today": "current",
    r"what \w+ said": "name the thing",
    r"nobody (?:told|said|asked)": "name who",
    r"wherever it": "where it",
    r"begins? with(?! [\"'`(])": "starts with",
    r"for want of": "because there is no",
    r"by default nobody": "Default: none",
    r"also if": "even if",
    r"all else": "everything else",
    r"by heart": "memorise",
    r"made anew": "made again, sampled again",
}
DIALECT = {
    re.compile(rf"\b{phrase}" + (r"\b" if phrase[-1].isalpha() else ""), re.IGNORECASE): better
    for phrase, better in PHRASES.items()
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "changelog.d").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    ROOT / "core/README.md",
    ROOT / "conformance/README.md",
    ROOT / "trainer/README.md",
]
SOURCES = sorted(path for path in ROOT.glob("*/**/src/**/*.py") if ".nox" not in path.parts)


def find(text: str) -> list[str]:
    """Return each phrase of the list in a text, with its words around it and what to write instead."""
    text = " ".join(text.split())
    return [
        f"…{text[max(0, match.start() - 40) : match.end() + 30]}… ({better})"
        for phrase, better in DIALECT.items()
        for match in phrase.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "x", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert find(prose(page)) == []


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its options and of its subcommands, each with its name."""
    yield name, command.help or ""
    for option in command.params:
        if isinstance(option, click.Option):
            yield f"{name} {option.opts[0]}", option.help or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for part in command.list_commands(context):
            yield from helps(command.get_command(context, part), f"{name} {part}")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_is_in_plain_english(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert {where: found for where, text in helps(command, name) if (found := find(text))} == {}


def shown(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts that people may read when a module runs: strings of three words that are not docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and len(text.split()) >= 3:
            yield node.lineno, text


def test_what_the_program_prints_is_in_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in SOURCES
        for line, text in shown(ast.parse(path.read_text(encoding="utf-8")))
        for phrase in find(text)
    ]
    assert not found, "\n".join(found)


LISTED = sorted(
    module
    for page in ROOT.glob("docs/reference/api/*.md")
    for modules in re.findall(r"<!-- generate: api (.+) -->", page.read_text(encoding="utf-8"))
    for module in modules.split()
    if find_spec(module.partition(".")[0])  # the plugins of other frameworks are not installed here
)


def docstrings(thing: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a public name and of its own public members."""
    yield name, inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and thing.__module__.startswith("lightning_"):
        for member, value in vars(thing).items():
            if member[0] != "_" and (callable(value) or isinstance(value, (property, classmethod, staticmethod))):
                yield f"{name}.{member}", inspect.getdoc(getattr(thing, member)) or ""


@pytest.mark.parametrize("path", LISTED)
def test_public_docstrings_are_in_plain_english(path: str) -> None:
    module = import_module(path)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and callable(value) and getattr(value, "__module__", "") == path
    ]
    found = {
        where: phrases
        for where, text in [(path, module.__doc__ or "")]
        + [each for name in names for each in docstrings(getattr(module, name), name)]
        if (phrases := find(text))
    }
    assert found == {}


def described(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, of its public classes and functions, and of the fields of its classes."""
    for node in ast.walk(tree):
        is_public = not str(getattr(node, "name", "")).startswith("_")
        if is_public and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            for field, after in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    yield field.lineno, str(getattr(after.value, "value", ""))


CONFIGS = ("config", "options", "choices", "flags")  # folders and modules with the fields of configurations


@pytest.mark.parametrize("of", ["plugins", "configurations"])
def test_docstrings_of_plugins_and_configurations_are_in_plain_english(of: str) -> None:
    def is_meant(path: Path) -> bool:
        parts = path.relative_to(ROOT).with_suffix("").parts
        return parts[0] == "plugins" if of == "plugins" else not {*CONFIGS}.isdisjoint(parts)

    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in filter(is_meant, SOURCES)
        for line, text in described(ast.parse(path.read_text(encoding="utf-8")))
        for phrase in find(text)
    ]
    assert not found, "\n".join(found)


def test_a_phrase_of_the_list_is_found() -> None:
    assert find("nothing is learned, for from a policy that always fails nothing can be learned, else.")
    assert find("The run continues, and there is no error.") == []
