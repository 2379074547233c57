from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_trainer.cli import cli
from lightning_trainer.config.origin import options_of
from lightning_trainer.kits.replay.running import Program, from_run
from lightning_trainer.kits.sft.resume import began_with


def make(folder: Path, rate: float, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"learning_rate": rate, "model": "m", "out": str(folder)}))
    lines = [{"kind": "val", "step": 0, "reward": rewards[0], "seconds": 1.0}]
    lines += [
        {"kind": "train", "step": step, "reward": reward, "seconds": 2.0, "tokens_generated": 10.0}
        for step, reward in enumerate(rewards)
    ]
    lines.append({"kind": "val", "step": len(rewards), "reward": rewards[-1], "seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_are_listed_with_what_they_cost_and_how_they_differ(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", 1e-5, [0.1, 0.5])
    make(tmp_path / "runs" / "b", 3e-5, [0.1, 0.2, 0.9])
    (tmp_path / "runs" / "notes").mkdir()
    done = CliRunner().invoke(cli, ["runs", "--json"])
    assert done.exit_code == 0, done.output
    first, second, last = map(json.loads, done.stdout.splitlines())
    assert (first["steps"], first["before"], first["after"], first["seconds"], first["tokens"]) == (
        2,
        0.1,
        0.5,
        6.0,
        20,
    )
    assert second["curve"] == [0.1, 0.2, 0.9]
    assert last == {"differ": {"learning_rate": [1e-05, 3e-05]}}
    shown = CliRunner().invoke(cli, ["runs", "runs/a", "runs/b"]).stdout
    assert "learning_rate: 1e-05, 3e-05" in shown
    assert "0.100 to 0.900" in shown
    make(tmp_path / "runs" / "c", 3e-5, [0.7])
    assert "0.700 to" not in CliRunner().invoke(cli, ["runs", "runs/c"]).stdout
    assert CliRunner().invoke(cli, ["runs", "nowhere"]).exit_code == 2
    make(tmp_path / "runs" / "c" / "inner", 3e-5, [0.3])
    assert "inner" not in CliRunner().invoke(cli, ["runs", "runs/c"]).stdout  # a run that is named stands for itself


def test_the_end_of_a_long_path_is_shown_because_it_tells_runs_apart(tmp_path: Path) -> None:
    parent = tmp_path / ("folder" * 12)
    make(parent / "RUN-X", 1e-5, [0.1, 0.5])
    cells = [line.split("│")[1].strip() for line in CliRunner().invoke(cli, ["runs", str(parent)]).stdout.splitlines()
             if "│" in line]  # fmt: skip
    assert "".join(cells) == str(parent / "RUN-X")


def test_difference_of_the_held_out_reward_has_its_interval(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", 1e-5, [0.25, 0.75])
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line, rewards in ((lines[0], [0.0, 0.0, 0.5, 0.5]), (lines[-1], [1.0, 0.5, 1.0, 0.5])):
        by_task = {"": {f"task{number}": reward for number, reward in enumerate(rewards)}}
        line |= {"rollouts": 4.0, "failed": 0.0, "by_task": by_task}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = json.loads(CliRunner().invoke(cli, ["runs", "--json"]).stdout.splitlines()[0])
    assert row["difference"] == 0.5
    assert row["difference_low"] < 0 < row["difference_high"] <= 1
    assert "+0.500 (" in CliRunner().invoke(cli, ["runs"]).stdout


def test_options_of_another_command_are_no_difference(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", 1e-5, [0.1, 0.5])
    make(tmp_path / "runs" / "sft", 3e-5, [0.1, 0.5])
    config = tmp_path / "runs" / "sft" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "held_out": 0.05}))
    last = CliRunner().invoke(cli, ["runs", "--json"]).stdout.splitlines()[-1]
    assert set(json.loads(last)["differ"]) == {"learning_rate"}


@pytest.mark.parametrize("kept", ["{", "[]", "null", "7"])
def test_a_run_whose_options_cannot_be_read_is_listed_and_told_where_they_are_needed(tmp_path: Path, kept: str) -> None:
    make(tmp_path / "a", 1e-5, [0.1, 0.5])
    make(tmp_path / "b", 1e-5, [0.1, 0.5])
    (tmp_path / "a/config.json").write_text(kept)
    rows = [json.loads(line) for line in CliRunner().invoke(cli, ["runs", str(tmp_path), "--json"]).stdout.splitlines()]
    assert [row["options"] for row in rows[:2] if row["folder"].endswith("a")] == [{}]
    (tmp_path / "a/checkpoint").mkdir()
    for reader in (
        lambda: began_with(tmp_path / "a"),
        lambda: options_of(tmp_path / "a"),
        lambda: from_run(Program(), str(tmp_path / "a/lightning.db")),
    ):
        with pytest.raises(ConfigError, match=r"config\.json (can't be read|is not a JSON object)"):
            reader()
