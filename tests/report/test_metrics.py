from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from lightning_trainer.config.files import CONFIG_NAME
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.log.lines import read
from lightning_trainer.report.metrics import MetricLog, write_atomically
from lightning_trainer.report.runs import row_of


def filled(folder: Path, from_step: int = 0) -> MetricLog:
    log = MetricLog(folder, from_step=from_step)
    log.add("val", from_step, {"reward": 0.1, "reward/writer": 0.2, "rollouts": 4})
    log.add("train", from_step, {"reward": 0.3, "loss": 1.5})
    log.add("train", from_step + 1, {"reward": 0.4, "loss": 1.0})
    return log


def test_each_step_is_a_line_of_json_and_a_point_for_tensorboard(tmp_path: Path) -> None:
    filled(tmp_path).close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"], line["reward"]) for line in lines] == [
        ("val", 0, 0.1),
        ("train", 0, 0.3),
        ("train", 1, 0.4),
    ]
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_series_are_by_kind_and_name(tmp_path: Path) -> None:
    log = filled(tmp_path)
    assert log.series("train", "loss") == [(0, 1.5), (1, 1.0)]
    assert log.series("val", "loss") == []
    log.close()


def test_resumed_run_takes_its_later_steps_again(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.add("val", 1, {"reward": 0.2, "rollouts": 4})
    log.add("val", 2, {"reward": 0.2, "rollouts": 4})
    log.close()
    again = MetricLog(tmp_path, from_step=1)
    assert [(line["kind"], line["step"]) for line in read(tmp_path / "metrics.jsonl")] == [
        ("val", 0),
        ("train", 0),
        ("val", 1),
    ]
    again.add("train", 1, {"reward": 0.9})
    assert again.series("train", "reward") == [(0, 0.3), (1, 0.9)]
    again.close()


def test_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "st')
    assert len(read(path)) == 3


def test_curve_is_a_picture_drawn_anew_when_there_is_more(tmp_path: Path) -> None:
    log = filled(tmp_path)
    first = log.draw().read_bytes()
    assert first.startswith(b"\x89PNG")
    log.add("train", 2, {"reward": 0.9})
    assert log.draw().read_bytes() != first
    log.close()


def test_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full") as failed:
        write_atomically(path, b"new")
    assert failed.value.filename == str(path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]


def test_alarm_is_a_line_of_its_own_said_once_while_it_stands(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    dead = {"reward": 1.0, "groups_without_signal": 1.0}
    raised = [[alarm.name for alarm in log.add("train", step, dead)] for step in range(4)]
    assert raised == [[], [], ["groups_dead"], []]
    log.add("train", 4, {**dead, "groups_without_signal": 0.0})
    assert log.alarms == []
    log.close()
    [line] = [line for line in read(tmp_path / "metrics.jsonl") if line["kind"] == "alarm"]
    assert (line["name"], line["step"], line["steps_taken"]) == ("groups_dead", 2, 3)
    assert "100% of the groups had equal rewards" in line["text"]
    again = MetricLog(tmp_path, from_step=5)
    assert [(alarm.name, alarm.step) for alarm in again.raised()] == [("groups_dead", 3)]
    again.close()
    cut = MetricLog(tmp_path, from_step=2)
    assert cut.raised() == []
    cut.close()


def test_an_alarm_of_the_validation_before_its_first_step_stays_in_a_resumed_run(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    log.add("train", 0, {"reward": 0.5})
    left_out = {"rollouts": 60.0, "failed": 60.0, "reward": 0.5, "reward_all": 0.0}
    [alarm] = log.add("val", 1, left_out)
    log.add("train", 1, left_out)
    assert [each.step for each in log.raised()] == [1, 2]
    log.close()
    again = MetricLog(tmp_path, from_step=1)
    assert (again.alarms, again.raised()) == ([alarm], [alarm])
    again.close()


def test_validations_on_other_tasks_are_not_compared(tmp_path: Path) -> None:
    for step, held_out, reward in ((0, "a*1", 0.9), (1, "b*1", 0.1), (2, "b*1", 0.2)):
        log = MetricLog(tmp_path, from_step=step, held_out=held_out)
        log.add("val", step, {"reward": reward, "rollouts": 4})
        log.add("train", step, {"reward": 0.5})
        assert {line["held_out"] for line in log.validations()} == {held_out}
        log.close()
    assert log.series("val", "reward") == [(1, 0.1), (2, 0.2)]
    (tmp_path / CONFIG_NAME).write_text("{}")
    row = row_of(tmp_path)
    assert (row.before, row.after) == (None, 0.2)


def test_a_long_history_stays_whole_when_the_run_resumes_and_the_viewer_reads_its_newest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    texts = [json.dumps({"kind": "train", "step": step, "reward": 0.5}) + "\n" for step in range(100)]
    path.write_text("".join(texts))
    monkeypatch.setattr("lightning_trainer.report.log.lines._MOST_BYTES", len("".join(texts[-10:])) + 5)
    MetricLog(tmp_path, from_step=100).close()
    assert path.read_text() == "".join(texts)
    assert caplog.text == ""
    assert [line["step"] for line in Run("run", str(tmp_path / "lightning.db"), tmp_path).lines()] == [*range(90, 100)]
    assert "Only the newest lines are read" in caplog.text
