"""How often the trainer's options are declared: `lightning_trainer.options` declares one for all commands."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "trainer/src/lightning_trainer"
RECORDS = ("Config", "Fields", "Options")  # how the classes end whose fields are options
REPEATED = 210  # lower it with each option that moves into a record


def declarations() -> Iterator[str]:
    """Name each option as often as it is declared: as a field of a record or as a flag of a command."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(RECORDS):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                yield from (field.id for field in fields if isinstance(field, ast.Name))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option":
                flags = [str(each.value) for each in node.args if isinstance(each, ast.Constant)] or ["computed"]
                yield flags[0].removeprefix("--").partition("/")[0].replace("-", "_")


def test_options_are_declared_again_less_and_less() -> None:
    assert sum(Counter(declarations()).values()) - len(Counter(declarations())) <= REPEATED
