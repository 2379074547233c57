"""A class is a noun and a function a verb or the noun that it returns: neither is named by a bare participle.

`judged` or `Kept` do not say who did what to what. A participle may end a function's name only after a verb or a
question word, as in `write_lost`, `is_expired` or `why_ended`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "plugins", "trainer", "conformance", "bench", "examples", "templates")
NOUNS = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed", "succeed"}  # these end in -ed as well
IRREGULAR = re.compile(
    "begun|bound|bought|broken|brought|built|caught|chosen|done|drawn|found|given|gone|grown|heard|held|kept|known|lost|"
    "made|met|paid|ran|said|seen|sent|shown|sold|sought|spent|spoken|stolen|taken|taught|thrown|told|understood|woken|"
    "written"
)
# What a name that ends in a participle may begin with.
VERBS = re.compile(
    "any|are|attend|can|check|count|delete|draw|end|find|forget|had|has|how|is|keep|link|load|looks|make|mark|marks|"
    "parse|raise|read|refuse|replace|run|select|serve|show|tell|when|why|work|wrap|write"
)
# Names that others use: a change would break their programs, or what they read.
GIVEN_TO_OTHERS = {
    "Told": "a schema in /openapi.json",
    "installed": "in the API reference, in two modules",
    "recorded": "in the API reference",
    "lightning_span_ended": "a hook",
    "calls_malformed": "an alarm, which is registered by its function's name",
    "entropy_collapsed": "an alarm",
    "length_collapsed": "an alarm",
    "discounted": "a value of `credit`",
    "unauthorized": "the name of HTTP's status 401",
}


def is_participle(word: str) -> bool:
    return bool(IRREGULAR.fullmatch(word)) or (word.endswith("ed") and word not in NOUNS)


def is_bad(name: str, *, is_class: bool) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)]
    return is_participle(words[-1]) and (is_class or len(words) == 1 or not VERBS.fullmatch(words[0]))


def named_by_participles(text: str) -> list[str]:
    """Return the module-level functions and classes that a bare participle names."""
    return [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and is_bad(node.name, is_class=isinstance(node, ast.ClassDef))
    ]


def test_no_function_or_class_is_named_by_a_bare_participle() -> None:
    """If it fails: name a function by its verb (`judge_batch`) or its result (`lost_calls`), a class by a noun."""
    found = {
        (name, path.relative_to(ROOT).as_posix())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not {".nox", "node_modules"} & {*path.parts}
        for name in named_by_participles(path.read_text(encoding="utf-8"))
    }
    assert sorted(each for each in found if each[0] not in GIVEN_TO_OTHERS) == []
    assert GIVEN_TO_OTHERS.keys() <= {name for name, _ in found}, "an exception is no longer needed"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def judged(): ...", ["judged"]),
        ("async def _shown(): ...", ["_shown"]),
        ("def rollouts_needed(): ...", ["rollouts_needed"]),
        ("class Told: ...", ["Told"]),
        ("class ErrorAsSent: ...", ["ErrorAsSent"]),
        ("class CheckExpired: ...", ["CheckExpired"]),
        ("def check_unchanged(): ...", []),
        ("def is_expired(): ...", []),
        ("def seed(): ...", []),
        ("class SentError: ...", []),
        ("class ListedCommand: ...", []),
    ],
)
def test_the_rule(code: str, found: list[str]) -> None:
    assert named_by_participles(code) == found
