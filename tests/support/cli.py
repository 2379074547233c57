"""Commands run in this process."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner, Result

from lightning_trainer.cli import cli

SCREEN = 24  # lines


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="lightning-rl")


def told(result: Result, *words: str, status: int = 2) -> None:
    """The mistake is told on one screen, with its status and no traceback."""
    assert result.exit_code == status, result.output
    assert "Traceback" not in re.split("The (?:last|most frequent) error", result.stderr)[0]
    assert len(result.stderr.splitlines()) <= SCREEN
    for word in words:
        assert word in result.stderr
