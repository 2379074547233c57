"""The experiment with three teams: its quick form, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from support.models.tiny import make_tiny_model

MEASURE = Path(__file__).parents[2] / "examples" / "teams" / "measure.py"


@pytest.mark.parametrize(
    "setup", ["rewriters, shared, safeguards", "orchestra, separate, plain", "voters, separate, safeguards"]
)
def test_each_team_runs_in_the_quick_form(tmp_path: Path, setup: str) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, MEASURE, "--quick", "--setups", setup, "--model", model, "--results", results]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (run["setup"], run["seed"]) == (setup, 0)
    assert run["held_out"][0] == [0, 0.0]  # a tiny random model solves nothing
    assert f"| {setup} | 1 | 0.00 | 0.00 | 0.00 | no reward |" in done.stdout
