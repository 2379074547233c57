"""How often the trainer's options are declared: `lightning_trainer.options` declares one for all commands."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "trainer/src/lightning_trainer"
RECORDS = ("Config", "Fields", "Options")  # how the classes end whose fields are options
# The options of a table inside a configuration, which have names of their own: `judge.model` is not `model`.
TABLES = {"JudgeOptions": "judge", "SelfOptions": "teacher_options"}
# What options are turned into by one function, `sampling_of` and `make`: nobody writes their fields.
VALUES = {"SamplingOptions", "TinkerOptions"}
REPEATED = 52  # lower it with each option that moves into a record


def declarations(sources: Path) -> Iterator[str]:
    """Name each option as often as it is declared: as a field of a record or as a flag of a command."""
    for path in sources.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(RECORDS) and node.name not in VALUES:
                table = f"{TABLES[node.name]}." if node.name in TABLES else ""
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                yield from (table + field.id for field in fields if isinstance(field, ast.Name))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "click.option":
                if isinstance(node.args[0], ast.Starred):  # of `field_option` and `config_options`: a field's own
                    continue
                flags = [each for each in node.args if isinstance(each, ast.Constant)]
                # A name that is put together, such as f"--{server}-key", is an option for each caller.
                name = str(flags[0].value) if flags else ast.unparse(node.args[0])
                yield name.removeprefix("--").partition("/")[0].replace("-", "_")


def repeated(sources: Path) -> int:
    """Count the declarations of options that have another one."""
    counts = Counter(declarations(sources))
    return sum(counts.values()) - len(counts)


def test_options_are_declared_again_less_and_less() -> None:
    """If it fails: declare the option in a record of `lightning_trainer.options` that both configurations inherit."""
    assert repeated(SOURCES) <= REPEATED


def test_a_declaration_is_counted_again_in_a_record_and_as_a_flag_but_not_in_a_table_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "options.py"
    source.write_text("class AOptions:\n    seed: int = 0\n    model: str\nclass JudgeOptions:\n    model: str\n")
    assert repeated(tmp_path) == 0
    source.write_text(source.read_text() + 'click.option("--seed")\nclass BConfig:\n    model: str\n')
    assert repeated(tmp_path) == 2
    source.write_text(source.read_text() + 'click.option(f"--{one}-key")\nclick.option(f"--{other}-file")\n')
    assert repeated(tmp_path) == 2
