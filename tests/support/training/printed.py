"""Numbers as a page prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from lightning_trainer.cli import cli


def printed(run: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["traces", "--store", str(run / "lightning.db"), "--json", *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]
