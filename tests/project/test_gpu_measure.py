"""What `nox -s gpu` reports if a part fails or its time is over: everything that was measured by then."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = """
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--dry-run" in sys.argv:
    print(json.dumps({"seconds_step": 2.0, "seconds_rollouts": 1.5, "seconds_update": 0.5, "engine": [],
                      "seconds_update_now": 0.25, "seconds_update_all": 0.75, "signal": 0.5}))
    sys.exit()
if given["--backend"] == "verl":
    sys.exit("no such card")
run = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "run"
run.mkdir(parents=True)
step = {"kind": "train", "tokens_generated": 90, "seconds": 3.0, "rollout_seconds": 1.5, "update_seconds": 0.55,
        "logprob_gap": 0.01, "groups_without_signal": 0.25}
(run / "metrics.jsonl").write_text("\\n".join(map(json.dumps, [{"kind": "val", "reward": 0.1}, step, step])))
sys.exit("out of memory in the third step")
"""


@pytest.fixture
def measure(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("measure", ROOT / "tests/gpu/measure.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure", module)
    spec.loader.exec_module(module)
    (tmp_path / "demo.py").write_text(DEMO)
    monkeypatch.setattr(module, "DEMO", tmp_path)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "model_folder", str)
    return module


def test_a_part_that_fails_hides_no_other(measure, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    args = argparse.Namespace(device="cpu", backends="torch,verl", steps=3, model="m", seconds=None, out=out)
    assert not measure.measure(args)
    report = (out / "report.md").read_text()
    assert "| torch | 0.10 | 2 | 60 | 3.00 | 1.50 |" in report
    assert "| s a step | 2.00 | 3.00 | **-33%, more than 20%** |" in report
    assert "| s of the update | 0.50 | 0.55 | -9% |" in report
    assert "| the same, 75% of groups with a signal | 0.50 | 0.55 | -9% |" in report
    assert "- torch: FAILED with status 1: out of memory in the third step," in report
    assert "- verl: FAILED with status 1: no such card," in report
    assert "- overhead: FAILED" in report


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(measure, tmp_path):
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600']).wait()"
    measure.SHORTEST_S = 0.0
    with pytest.raises(measure.OutOfTimeError, match="cut off after"):
        measure.call([sys.executable, "-c", program], tmp_path / "log", 0.3)
    with pytest.raises(measure.OutOfTimeError, match="no time was left"):
        measure.call([sys.executable, "-c", program], tmp_path / "log", -1.0)


def test_what_the_folder_to_carry_lacks_is_named(tmp_path):
    for name, needs in (("one", "two>=2"), ("two", "torch"), ("three", "four; python_version < '3'")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n")
    code = f"import carry, pathlib; print(list(carry.missing(pathlib.Path({str(tmp_path)!r}), '3.12', 'torch')))"
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "tests/gpu", text=True)
    assert json.loads(told.replace("'", '"')) == ["two>=2 (needed by one)"]
