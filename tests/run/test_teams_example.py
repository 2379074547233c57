"""The experiment with three teams: its quick form, with a tiny model, and its table and picture."""

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


SETUPS = ("rewriters, shared, safeguards", "orchestra, separate, plain", "voters, separate, safeguards")


def test_each_team_runs_in_the_quick_form(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, MEASURE, "--quick", "--setups", ";".join(SETUPS), "--model", model, "--results", results]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(run["setup"], run["seed"]) for run in runs] == [(setup, 0) for setup in SETUPS]
    for run in runs:
        assert run["held_out"][0] == [0, 0.0]  # a tiny random model solves nothing
        assert f"| {run['setup']} | 1 | 0.00 | 0.00 | 0.00 | no reward | 0 |" in done.stdout


def test_a_measurement_is_drawn_and_its_table_goes_into_the_page(tmp_path: Path) -> None:
    curves = {"plain": [[0, 0.1], [2, 0.8], [4, 0.2]], "safeguards": [[0, 0.1], [2, 0.8], [4, 0.6]]}
    events = {"plain": [[4, "cliff"]], "safeguards": [[4, "cliff"], [4, "rollback"]]}
    runs = [
        {"setup": f"voters, shared, {guards}", "seed": seed, "curves": {}, "before": {}, "after": {}, "seconds": 1.0}
        | {"held_out": curves[guards], "events": events[guards]}
        for seed in (0, 1)
        for guards in curves
    ]
    results, page = tmp_path / "results.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(run) + "\n" for run in runs))
    page.write_text("# Teams\n<!-- measured -->\nNot yet.\n<!-- /measured -->\nend\n")
    files = ["--results", results, "--readme", page, "--picture", tmp_path / "a.png"]
    done = subprocess.run(
        [sys.executable, str(MEASURE), "--draw", *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "| voters, shared, plain | 2 | 0.10 | 0.80 | 0.20 | 25%, 25% | 0, 0 |\n" in page.read_text()
    assert "| voters, shared, safeguards | 2 | 0.10 | 0.80 | 0.60 | 75%, 75% | 1, 1 |\n" in page.read_text()
