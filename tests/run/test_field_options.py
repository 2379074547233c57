"""Options of commands that are fields of a record: name, type, bounds and default are the field's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from lightning_trainer.flags.fields import field_option
from lightning_trainer.options.record import OptionRecord


class SomeOptions(OptionRecord):
    """Options of each kind."""

    few_steps: int = Field(default=3, ge=1, le=9)
    """Number of `steps`."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the tasks."""
    how: Literal["plain", "asked"] = "plain"
    """How to sample."""
    file: Path | None = None
    """File to read."""
    fast: bool = False
    """Be fast."""
    more: dict[str, Any] = Field(default_factory=dict)
    """Further options."""
    text: str
    """Any text."""


NAMES = tuple(SomeOptions.model_fields)


def call(*words: str, **more: Any) -> tuple[dict[str, Any], str, int]:
    got: dict[str, Any] = {}

    def command(**flags: Any) -> None:
        got.update(flags)

    for name in NAMES:
        command = field_option(SomeOptions, name, **more)(command)
    done = CliRunner().invoke(click.command()(command), words)
    return got, done.output, done.exit_code


def test_values_have_the_types_of_the_fields_and_are_none_if_not_given():
    assert call()[0] == dict.fromkeys(NAMES) | {"more": ()}
    words = ("--few-steps", "4", "--share", "0.5", "--how", "asked", "--file", "a", "--fast", "--more", "x=1")
    expected = {"few_steps": 4, "share": 0.5, "how": "asked", "file": Path("a"), "fast": True, "more": ("x=1",)}
    assert call(*words)[0] == {**expected, "text": None}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--few-steps", "0"), "1<=x<=9"),
        (("--few-steps", "10"), "1<=x<=9"),
        (("--share", "0"), "0<x<1"),
        (("--share", "1"), "0<x<1"),
        (("--how", "other"), "'plain', 'asked'"),
    ],
)
def test_what_the_field_refuses_the_command_refuses(words, told):
    _, output, status = call(*words)
    assert status == 2
    assert told in output


def test_the_help_is_the_docstring_with_the_default():
    shown = " ".join(call("--help")[1].split())
    assert "--few-steps INTEGER RANGE Number of steps. [default: 3]" in shown
    assert "--how [plain|asked] How to sample. [default: plain]" in shown
    assert "--fast Be fast." in shown
    assert "Be fast. [default" not in shown
    assert "--text TEXT Any text." in shown
    assert "Other words." in " ".join(call("--help", text="Other words.")[1].split())


def test_a_filled_option_has_the_default_of_the_field():
    got: dict[str, Any] = {}

    def command(**flags: Any) -> None:
        got.update(flags)

    command = click.command()(field_option(SomeOptions, "few_steps", dest="count", filled=True)(command))
    CliRunner().invoke(command, [])
    assert got == {"count": 3}
