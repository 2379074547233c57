"""A measurement of the examples on real data, with commands in the trainer's place: it goes on, and keeps its seeds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

STAGES = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + chr(10))
resumed = "--resume" in words
folder = pathlib.Path(words[words.index("--resume" if resumed else "--out") + 1])
if not resumed:
    folder.mkdir()  # as the real one, which takes no folder that holds anything
kept = {{"eval": "eval.json", "train": "checkpoint", "sft": "learning.json"}}[words[0]]
(folder / kept).touch()
steps = [{{"kind": "train", "tokens": 5, **({{"tokens_generated": 700}} if words[0] == "train" else {{}})}}] * 2
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in [*steps, {{"kind": "val"}}]))
if folder.name == pathlib.Path({stopped!r}).read_text():
    sys.exit(130)
print(json.dumps({{"checkpoint": str(folder / "checkpoint"), "mean": 0.5, "low": 0.4, "high": 0.6, "tasks": 2,
                  "samples": 1}}))
"""


@pytest.mark.parametrize("stage", ["untrained", "sft", "train", "after-RL"])
def test_a_measurement_that_was_stopped_midway_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    log, stopped = tmp_path / "log", tmp_path / "stopped"
    stopped.write_text(stage)
    program = tmp_path / "bin/lightning-rl"
    program.parent.mkdir()
    program.write_text(STAGES.format(python=sys.executable, log=str(log), stopped=str(stopped)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import experiment

    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data/sft.jsonl").touch()
    with pytest.raises(SystemExit, match="ended with 130"):
        experiment.Experiment("musique", 0, out, quick=False).run()
    stopped.write_text("none")
    begun = log.read_text().splitlines()
    rows = experiment.Experiment("musique", 0, out, quick=False).run()
    [first, *_] = [json.loads(line) for line in log.read_text().splitlines()[len(begun) :]]
    command = json.loads(begun[-1])
    assert first[0] == command[0]
    assert "--resume" in first
    assert first[-1 if stage in ("sft", "train") else 2].endswith(stage)
    assert [row["stage"] for row in rows] == ["untrained", "after SFT", "after RL"]
    assert ("over" in experiment.table(rows)) is (stage in ("sft", "train"))
    assert [row["tokens"] for row in rows] == [0, 10, 1400]
    assert "| 1,400 |" in experiment.table(rows)
    another = experiment.Experiment("musique", 1, out, quick=False).run()
    assert [row["stage"] for row in another] == ["after SFT", "after RL"]  # untrained, it is the same model


def test_seeds_measured_before_stay_and_those_of_other_options_have_a_table_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import experiment

    options = tmp_path / "experiment.toml"
    options.write_text("[train]\nsteps = 1\n")

    def row(stage: str, seed: int, mean: float) -> dict[str, Any]:
        found = {"mean": mean, "low": None, "high": None, "tasks": 2, "samples": 1}
        return {
            "stage": stage, "seed": seed, "folder": "/here", "found": {**found, "evaluated": "/here"}, "seconds": 0.0,
        }  # fmt: skip

    experiment.keep(tmp_path, [row("untrained", 1, 0.1), row("after RL", 1, 0.2)])
    experiment.keep(tmp_path, [row("untrained", 0, 0.3), row("after RL", 0, 0.4)])
    found = experiment.keep(tmp_path, [row("untrained", 1, 0.5)])
    assert [(each["stage"], each["seed"], each["found"]["mean"]) for each in found] == [
        ("untrained", 0, 0.3), ("after RL", 0, 0.4), ("untrained", 1, 0.5),
    ]  # fmt: skip
    assert [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()] == found
    assert "/here" not in (tmp_path / "measured.jsonl").read_text()
    options.write_text("[train]\nsteps = 2\n")
    everything = experiment.keep(tmp_path, [row("untrained", 0, 0.6)])
    assert [(each["seed"], each["found"]["mean"]) for each in everything] == [(0, 0.6), (0, 0.3), (0, 0.4), (1, 0.5)]
    current, others = experiment.tables(everything, options, experiment.table).split("Measured with other options")
    assert "| untrained | 0 | 0.600 |" in current
    assert found[0]["options"] in others
    assert [line.split(" | ")[2] for line in others.splitlines()[-3:]] == ["0.300", "0.400", "0.500"]


def test_runs_that_compared_credit_before_stay_beside_those_of_another_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import credit

    (tmp_path / "credit.toml").write_text("tokens = 10\n")
    credit.keep(tmp_path, [credit.Run(setup=setup, seed=1, steps=1, curve=[]) for setup in ("grpo", "tree")])
    credit.keep(tmp_path, [credit.Run(setup="grpo", seed=0, steps=2, curve=[])])
    rows = credit.keep(tmp_path, [credit.Run(setup="grpo", seed=1, steps=3, curve=[])])
    assert [(row["setup"], row["seed"], row["steps"]) for row in rows] == [
        ("grpo", 0, 2), ("grpo", 1, 3), ("tree", 1, 1),
    ]  # fmt: skip
    assert [json.loads(line) for line in (tmp_path / "credit.jsonl").read_text().splitlines()] == rows
    (tmp_path / "credit.toml").write_text("tokens = 20\n")
    assert len(credit.keep(tmp_path, [credit.Run(setup="grpo", seed=1, steps=4, curve=[])])) == 4


PUBLISHED = {"experiment.toml": "measured.jsonl", "credit.toml": "credit.jsonl"}


@pytest.mark.parametrize(
    "toml", sorted(path for name in PUBLISHED for path in EXAMPLES.glob(f"*/{name}")), ids=lambda path: path.parent.name
)
def test_what_is_published_has_the_current_options_or_says_that_it_has_others(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import curves

    lines = toml.with_name(PUBLISHED[toml.name]).read_text().splitlines()
    page = toml.with_name("README.md").read_text()
    for options in {json.loads(line)["options"] for line in lines} - {curves.hash_options(toml)}:
        assert f"Measured with other options than the current ones of `{toml.name}` (`{options}`):" in page


SLOW = """#!{python}
import pathlib, time
here = pathlib.Path({here!r})
try:
    (here / "begun").touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    (here / "kept").touch()
    raise SystemExit(130)
"""


def _measurement(tmp_path: Path, stages: str) -> dict[str, Any]:
    """Lay out an experiment of its own, with a command in the trainer's place; how to start it."""
    program, examples = tmp_path / "bin/lightning-rl", tmp_path / "examples"
    program.parent.mkdir()
    program.write_text(stages)
    program.chmod(0o755)
    (examples / "own").mkdir(parents=True)
    for name in ("experiment.py", "curves.py"):
        shutil.copy(EXAMPLES / name, examples / name)
    (examples / "own/experiment.toml").write_text("[train]\nsteps = 1\n")
    (examples / "own/README.md").write_text("<!-- measured -->\n<!-- /measured -->\n")
    (tmp_path / "experiments/own/data").mkdir(parents=True)
    (tmp_path / "experiments/own/data/sft.jsonl").touch()
    return {
        "args": [sys.executable, str(examples / "experiment.py"), "own", "--seeds", "0"],
        "cwd": tmp_path, "env": {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"},
    }  # fmt: skip


def test_what_was_measured_with_other_options_is_not_told_as_of_these(tmp_path: Path) -> None:
    (tmp_path / "stopped").write_text("none")
    places = {"log": str(tmp_path / "log"), "stopped": str(tmp_path / "stopped")}
    measurement = _measurement(tmp_path, STAGES.format(python=sys.executable, **places))
    own = tmp_path / "examples/own"
    assert subprocess.run(**measurement, check=False, timeout=200).returncode == 0
    measured, begun = (own / "measured.jsonl").read_text(), (tmp_path / "log").read_text()
    assert subprocess.run(**measurement, check=False, timeout=200).returncode == 0  # all is there
    (own / "experiment.toml").write_text("[train]\nsteps = 2\n")
    other = subprocess.run(**measurement, capture_output=True, text=True, check=False, timeout=200)
    assert other.returncode == 1
    assert "other options" in other.stderr
    assert (own / "measured.jsonl").read_text() == measured
    assert (tmp_path / "log").read_text() == begun


def test_a_stage_that_is_interrupted_has_time_to_keep_where_it_stands(tmp_path: Path) -> None:
    measurement = _measurement(tmp_path, SLOW.format(python=sys.executable, here=str(tmp_path)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    with subprocess.Popen(**measurement, start_new_session=True) as running:
        signal.signal(signal.SIGINT, before)
        while not (tmp_path / "begun").exists():
            assert running.poll() is None
        os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
        running.wait(timeout=200)
    assert (tmp_path / "kept").exists()
