"""`lightning-rl sft --resume`: what was cut off comes to what it would have come to."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.cli import cli
from lightning_trainer.config.files import to_json
from lightning_trainer.kits.sft import fit
from lightning_trainer.kits.sft.config import SftConfig

pytestmark = pytest.mark.torch


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    asked = [{"prompt": [{"role": "user", "content": f"say {n}"}], "chosen": "abc"[n % 3] * 4} for n in range(24)]
    both = [{**each, "completion": each["chosen"], "rejected": "bad words"} for each in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in both))
    return path


@pytest.fixture(autouse=True)
def kept_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "LONGEST_UNSAVED_S", 0)


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["sft", *map(str, arguments)])


def options(model: Path) -> list[Any]:
    own = ["--model", model, "--device", "cpu", "--batch-size", 4, "--steps", 8, "--learning-rate", 3e-3]
    return [*own, "--backend-options", "threads=1", "--held-out", 0.2, "--eval-every", 3]


def cut(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let the machine go in the middle of the step after these."""
    taken, real = 0, TorchLearner.update

    def update(learner: TorchLearner, rows: Any) -> dict[str, float]:
        nonlocal taken
        if taken == after:
            monkeypatch.setattr(TorchLearner, "update", real)
            raise error
        taken += 1
        return real(learner, rows)

    monkeypatch.setattr(TorchLearner, "update", update)


def numbers(folder: Path) -> list[tuple[str, int, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in found]


WAYS = {"likelihood": [], "dpo": ["--loss", "dpo"], "lora": ["--lora-rank", 4], "weights": ["--held-out", 0]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", [2, 5, 7])  # before the first look, in a step after which it looks, in the last one
def test_what_was_killed_comes_to_the_same(
    tmp_path: Path, tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, way: str, after: int
) -> None:
    asked = [data, *options(tiny_model), *WAYS[way]]
    whole = run(*asked, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    cut(monkeypatch, after, RuntimeError("the machine is gone"))
    assert isinstance(run(*asked, "--out", tmp_path / "cut").exception, RuntimeError)
    assert (tmp_path / "cut" / "learning.json").exists()
    again = run("--resume", tmp_path / "cut")
    assert again.exit_code == 0, again.output
    told = [json.loads(result.stdout.splitlines()[-1]) for result in (whole, again)]
    for each in told:
        for name in ("seconds", "folder", "checkpoint"):
            del each[name]
    assert told[0] == told[1]
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "cut")
    (weights,) = (tmp_path / "whole" / "checkpoint").glob("*model.safetensors")
    assert weights.read_bytes() == (tmp_path / "cut" / "checkpoint" / weights.name).read_bytes()
    for name in ("whole", "cut"):  # nothing is left of what only going on needs
        left = {path.name for path in (tmp_path / name).iterdir()} - {".lock"}
        assert left == {"checkpoint", "config.json", "lineage.jsonl", "metrics.jsonl", "tensorboard"}


def test_what_was_asked_to_stop_goes_on_where_it_stopped(
    tmp_path: Path, tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "LONGEST_UNSAVED_S", 1e9)
    real, signals = TorchLearner.update, iter([None, None, None, signal.SIGINT])

    def update(learner: TorchLearner, rows: Any) -> dict[str, float]:
        if (number := next(signals, None)) is not None:
            signal.raise_signal(number)
        return real(learner, rows)

    monkeypatch.setattr(TorchLearner, "update", update)
    stopped = run(data, *options(tiny_model), "--out", tmp_path / "cut")
    assert "stopping: learning (step 4 of 8) must finish first, then the weights are saved" in capfd.readouterr().err
    assert f"Continue with: lightning-rl sft --resume {tmp_path / 'cut'}" in stopped.output.replace("\n", "")
    assert json.loads((tmp_path / "cut" / "learning.json").read_text())["standing"]["taken"] == 4
    assert run("--resume", tmp_path / "cut").exit_code == 0
    assert [step for kind, step, _ in numbers(tmp_path / "cut") if kind == "train"] == list(range(8))


def test_a_store_with_a_password_among_the_data_is_named_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("lightning_trainer.kits.sft.command._sft", lambda config, _: asked.append(config.data))
    url = "postgresql://me:secret@host/db"
    (tmp_path / "config.json").write_text(to_json(SftConfig(data=(url,), model="m")))
    (tmp_path / "learning.json").write_text("{}")
    assert "secret" not in (tmp_path / "config.json").read_text()
    assert "Give DATA again" in run("--resume", tmp_path).output
    assert "Leave out seed" in run("--resume", tmp_path, url, "--seed", 3).output
    run("--resume", tmp_path, url)
    assert asked == [(url,)]


def test_other_data_or_options_are_refused_and_nothing_is_lost(
    tmp_path: Path, tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 4, RuntimeError("the machine is gone"))
    run(data, *options(tiny_model), "--out", tmp_path / "cut")
    before = data.read_text()
    data.write_text(before.replace("bbbb", "xxxx"))
    changed = run("--resume", tmp_path / "cut")
    assert changed.exit_code == 2
    assert "its data changed since" in " ".join(changed.output.split())
    data.write_text(before)
    assert "Leave out seed" in run("--resume", tmp_path / "cut", "--seed", 3).output
    assert run("--resume", tmp_path / "cut").exit_code == 0
    again = run("--resume", tmp_path / "cut")
    assert again.exit_code == 2
    assert "can't be resumed" in again.output


def test_what_a_killed_life_left_half_written_is_swept(
    tmp_path: Path, tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 4, RuntimeError("the machine is gone"))
    run(data, *options(tiny_model), "--out", tmp_path / "cut")
    for name in (".checkpoint.7", ".resume-a.7", ".resume-b.7", "mine"):
        (tmp_path / "cut" / name).mkdir()
    assert run("--resume", tmp_path / "cut").exit_code == 0
    left = {path.name for path in (tmp_path / "cut").iterdir()}
    assert "mine" in left
    assert not any(name.startswith((".checkpoint", ".resume", "resume")) for name in left)
