"""`lightning-rl init`: what it makes trains at once."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_trainer.cli import cli
from lightning_trainer.run.starter import write_project
from support.cli import call


def test_a_project_is_made_whole_and_never_over_another(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--framework", "openai"])
    assert made.exit_code == 0, made.output
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {
        "agent.py",
        "prompts.py",
        "tools.py",
        "reward.py",
        "run.toml",
        "README.md",
        "train.jsonl",
        "val.jsonl",
    }
    assert "a program for openai" in made.output
    meant = CliRunner().invoke(cli, ["init", str(tmp_path / "openai")])  # as if the folder said the framework
    assert (meant.exit_code, (tmp_path / "openai").exists()) == (2, False)
    assert "init my-agent --framework openai" in meant.output
    again = CliRunner().invoke(cli, ["init", str(tmp_path / "mine")])
    assert again.exit_code == 2
    assert "agent.py" in again.stderr
    assert "lightning_openai.attach()" in (tmp_path / "mine" / "agent.py").read_text()
    spaced = CliRunner().invoke(cli, ["init", str(tmp_path / "my agent")])
    assert f"cd '{tmp_path / 'my agent'}'" in spaced.output


def test_what_a_project_lacks_here_is_said_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"lightning-crewai": False, "crewai": True}
    monkeypatch.setattr("lightning_trainer.run.starter._is_installed", there.__getitem__)
    made = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--framework", "crewai"])
    assert "Not installed here: lightning-crewai. In a clone" in made.output
    install = 'uv pip install --torch-backend=auto ./core ./plugins/openai ./plugins/crewai "./trainer[torch]" crewai'
    assert install in made.output
    assert install in (tmp_path / "mine" / "README.md").read_text()
    there["lightning-crewai"] = True
    made = CliRunner().invoke(cli, ["init", str(tmp_path / "again"), "--framework", "crewai"])
    assert "Not installed" not in made.output


def test_a_projects_run_can_be_gone_on_with(tmp_path: Path) -> None:
    write_project(tmp_path, "openai")
    assert tomllib.loads((tmp_path / "run.toml").read_text()).get("checkpoint", "newest") == "newest"


@pytest.mark.torch
@pytest.mark.parametrize("framework", ["langgraph", "openai"])
def test_a_project_trains_at_once(
    framework: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    write_project(folder, framework)
    model = shutil.copytree(tiny_model, tmp_path / "model")  # the program's prompts are longer than its context
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 2048}))
    small = ["--steps", "1", "--batch-size", "2", "--group-size", "2", "--max-tokens", "5", "--workers", "1"]
    (folder / "val.jsonl").write_text((folder / "val.jsonl").read_text().splitlines()[0] + "\n")
    monkeypatch.chdir(folder)
    # Random letters all earn 0, and an entropy bonus is something to learn from all the same.
    done = call("train", "--config", "run.toml", "--out", "out", "--model", model, "--entropy-coef", "0.01", *small)
    assert done.exit_code in (0, 4), done.output
    trained = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    # The answerer's calls: a letter is a token here, so the caller's required tool call ends in its fixed beginning.
    assert [line["calls_trained"] for line in trained if line["kind"] == "train"] == [4]
