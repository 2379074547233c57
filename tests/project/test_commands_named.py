"""The trainer's README names every command: who reads it learns what there is."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_trainer.cli import COMMANDS

README = Path(__file__).parents[2] / "trainer" / "README.md"


def test_the_readme_of_the_trainer_names_every_command_once() -> None:
    rows = [line.split("|")[1] for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`lightning-rl ([a-z]+)", row)]
    assert named == list(COMMANDS)
