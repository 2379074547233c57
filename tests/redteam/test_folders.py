"""Attacks with what somebody else made: a run's folder, a file of tasks. They are looked at, and run nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_trainer.cli import cli
from lightning_trainer.kits.view.runs import Runs
from lightning_trainer.runner.worker.workfolder import source_of
from support.training.example_runs import make_run

RULE = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()

def rule(trace):
    return []
"""


@pytest.fixture
def strange(tmp_path, monkeypatch) -> Path:
    """The folder of a run whose options name code that lies in it, reached from where the user is."""
    folder = make_run(tmp_path / "runs" / "strange", steps=1, groups=1, size=2)
    (folder / "payload.py").write_text(RULE)
    change(folder, rewards={"runs.strange.payload:rule": 1.0, "tool_status": 0.5})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name == "runs" or name.startswith("runs.")]:
        del sys.modules[name]


def change(folder: Path, **options) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **options}))


def blame(*words: str):
    return CliRunner().invoke(cli, ["blame", *words, "--json"])


def view(folder: Path, *pages: str, trusted: bool = False) -> None:
    from starlette.testclient import TestClient

    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.kits.view.pages import create_view
    from lightning_trainer.kits.view.routes import Views

    keys = Keys.fresh()
    client = TestClient(create_view(Views(Runs(folder, trusted=trusted)), keys))
    headers = {"authorization": f"Bearer {keys.issue('viewer')}"}
    for page in pages or ("credit", "account"):
        client.get(f"/api/view/{page}", params={"run": folder.name, "step": 0}, headers=headers).raise_for_status()


def test_code_that_a_runs_folder_names_is_not_imported(strange):
    recorded = blame(str(strange))
    assert recorded.exit_code == 0, recorded.output
    assert "tool_status" in recorded.output  # what the run recorded counts
    view(strange)
    assert not (strange / "it ran").exists()
    assert blame(str(strange), "--trust").exit_code == 0
    assert (strange / "it ran").exists()


STRANGE = {
    "a list of rules": lambda path: path.write_text('{"rewards": ["runs.strange.payload:rule"]}'),
    "a number of rules": lambda path: path.write_text('{"rewards": 5}'),
    "nested": lambda path: path.write_text('{"rewards": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "half a character": lambda path: path.write_text('{"model": "\\ud800"}'),
    "a pipe": os.mkfifo,
    "no end": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", STRANGE)
def test_options_that_are_none_hold_up_neither_their_run_nor_the_others(strange, name):
    other = make_run(strange.parent / "other", steps=1, groups=1, size=2)
    (strange / "config.json").unlink()
    STRANGE[name](strange / "config.json")
    refused, listed = blame(str(strange)), CliRunner().invoke(cli, ["runs", str(strange.parent), "--json"])
    assert isinstance(refused.exception, SystemExit)
    assert "config.json" in refused.output
    assert listed.exit_code == 0, listed.output
    assert other.name in listed.output
    view(strange, "runs", "run", "rewards")


@pytest.mark.timeout(60)
def test_numbers_that_are_none_are_left_out(strange):
    numbers = strange / "metrics.jsonl"
    with numbers.open("ab") as file:
        file.write(b'\xff\n5\n[1]\n{"kind": 5, "step": 0}\n{"kind": "val", "step": "x"}\n' + b"[" * 100_000 + b"\n")
    before = Runs(strange).all()[0].lines()
    assert {type(line["step"]) for line in before} == {int}
    view(strange, "runs", "run")
    numbers.unlink()
    os.mkfifo(numbers)
    assert Runs(strange).all()[0].lines() == []
    view(strange, "runs", "run")


def test_a_store_that_a_runs_folder_names_is_not_connected_to(strange):
    with socket.create_server(("127.0.0.1", 0)) as heard:
        heard.setblocking(False)
        for scheme in ("http://127.0.0.1", "postgresql://somebody:secret@127.0.0.1"):
            change(strange, store=f"{scheme}:{heard.getsockname()[1]}/store")
            refused = blame(str(strange))
            assert refused.exit_code != 0
            assert "--trust" in refused.output
            assert "secret" not in refused.output
            assert Runs(strange).all()[0].store == str(strange / "lightning.db")
            view(strange)
        with pytest.raises(BlockingIOError):
            heard.accept()
    assert Runs(strange, trusted=True).all()[0].store.startswith("postgresql://")


@pytest.mark.parametrize(
    "value", ["../secret", "/etc", "a/../../secret", ".", "", "..", "x\0y", "./../repos/../secret"]
)
def test_a_field_of_a_task_leads_out_of_no_folder(tmp_path, monkeypatch, value):
    for name in ("repos/a", "secret"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert source_of("repos/{repo}", {"repo": "a"}).path == tmp_path / "repos" / "a"
    for template in ("repos/{repo}", "{repo}", "repos/{repo}/"):
        with pytest.raises(ConfigError, match=r"not inside|no folder"):
            source_of(template, {"repo": value})


def test_a_field_of_a_task_names_no_home_and_no_revision(tmp_path, monkeypatch):
    (tmp_path / "~root").mkdir()
    monkeypatch.chdir(tmp_path)
    assert source_of("{repo}", {"repo": "~root"}).path == tmp_path / "~root"
    with pytest.raises(ConfigError, match="no folder"):
        source_of("./{repo}", {"repo": "~root@HEAD"})
