from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer import TrainConfig
from lightning_trainer.run.folders import read_config, run_folder
from lightning_trainer.run.state import (
    State,
    _unwritten,
    check_identity,
    check_resumable,
    find,
    identity_of,
    read_state,
    save,
)
from lightning_trainer.run.train import _stop_message
from lightning_trainer.session.folder import hold_folder
from support.kills import killed_after

STATE = State(step=3, identity={"seed": 0, "data": "abc"}, agents=("writer",), flat_steps=None, rewards=(0.5, None))


def write(folder: Path) -> None:
    (folder / "weights").write_text("w")


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = save(tmp_path, STATE, write, keep=2)
    assert read_state(saved) == STATE
    assert (tmp_path / "checkpoint" / "weights").read_text() == "w"
    assert find(tmp_path) == (tmp_path, saved)
    assert find(saved) == (tmp_path, saved)


def test_run_folder_can_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "old", STATE, write, keep=2)
    (tmp_path / "old").rename(tmp_path / "new")
    assert read_state(find(tmp_path / "new")[1]) == STATE


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, replace(STATE, step=step), write, keep=2)
    assert steps(tmp_path) == ["step-000003", "step-000004"]
    assert (tmp_path / "checkpoint").resolve().name == "step-000004"


def test_run_that_went_back_keeps_what_it_writes(tmp_path: Path) -> None:
    for step in (7, 8, 2, 3):
        save(tmp_path, replace(STATE, step=step), write, keep=2)
    assert steps(tmp_path) == ["step-000002", "step-000003"]


def test_a_run_that_is_killed_at_any_moment_of_a_save_writes_the_next_ones(tmp_path: Path) -> None:
    for calls in count():
        run = tmp_path / str(calls)
        for step in (1, 2):
            save(run, replace(STATE, step=step), write, keep=2)
        with killed_after(calls) as late:
            save(run, replace(STATE, step=3), write, keep=2)
        assert (find(run)[1] / "weights").exists()
        with run_folder(None, run):
            for step in (4, 5):
                save(run, replace(STATE, step=step), write, keep=2)
        assert steps(run) == ["step-000004", "step-000005"]
        if not late:
            break
    assert calls > 5


def test_an_old_checkpoint_that_can_not_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmdir(*_: object, **__: object) -> None:
        raise OSError(39, "Directory not empty")  # a file system across a network keeps files that are open elsewhere

    monkeypatch.setattr(os, "rmdir", rmdir)
    for step in (1, 2, 3):
        save(tmp_path, replace(STATE, step=step), write, keep=2)
    monkeypatch.undo()
    assert find(tmp_path)[1].name == "step-000003"
    with run_folder(None, tmp_path):
        assert steps(tmp_path) == ["step-000002", "step-000003"]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, STATE, write, keep=2)
    save(tmp_path, STATE, lambda folder: (folder / "weights").write_text("again"), keep=2)  # type: ignore[arg-type,return-value]
    assert (tmp_path / "checkpoint" / "weights").read_text() == "again"
    assert steps(tmp_path) == ["step-000003"]


def test_save_that_fails_leaves_the_checkpoint_before_and_nothing_half_written(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        write(folder)
        raise OSError(28, "No space left on device")

    save(tmp_path, STATE, write, keep=2)
    with pytest.raises(ConfigError, match="No space left on device"):
        save(tmp_path, replace(STATE, step=4), fails, keep=2)
    assert steps(tmp_path) == ["step-000003"]
    assert read_state(find(tmp_path)[1]) == STATE


class StoppedRun:
    """A run as far as `_stop_message` reads it."""

    def __init__(self, folder: Path, steps: int = 1) -> None:
        self.folder, self.log, self._steps = folder, self, steps

    def lines(self, kind: str) -> list[dict[str, int]]:
        return [{"step": step} for step in range(self._steps)]


@pytest.mark.parametrize("resumable", [None, False, True])
def test_resume_is_suggested_only_where_it_works(tmp_path: Path, resumable: bool | None) -> None:
    """After Ctrl-C, and if the next checkpoint can't be written; None: there is no checkpoint."""
    if resumable is not None:
        save(tmp_path, replace(STATE, resumable=resumable), write, keep=2)
    texts = [
        _stop_message(StoppedRun(tmp_path)),  # type: ignore[arg-type]
        _unwritten(tmp_path, tmp_path / "checkpoints" / "step-000004", OSError(28, "No space left on device")),
    ]
    for text in texts:
        assert (f"--resume {tmp_path}" in text) == bool(resumable)
    if resumable is False:
        assert all(str(find(tmp_path)[1]) in text for text in texts)  # the weights to start from
    if resumable:
        check_resumable(read_state(find(tmp_path)[1]), find(tmp_path)[1])


@pytest.mark.parametrize(("taken", "lost"), [(5, ""), (7, ", 2 of them since the last checkpoint")])
def test_a_run_that_verl_saved_is_continued_and_the_steps_that_are_lost_are_counted(
    tmp_path: Path, taken: int, lost: str
) -> None:
    model = tmp_path / "checkpoints" / "global_step_5" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (tmp_path / "checkpoint").symlink_to(model)
    text = _stop_message(StoppedRun(tmp_path, taken))  # type: ignore[arg-type]
    assert text == f"stopped after {taken} steps{lost}. Continue with: lightning-rl train --resume {tmp_path}"


def test_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint"):
        find(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder "):
        read_config(tmp_path / "nowhere")


def test_run_that_was_stopped_before_its_first_checkpoint_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0}\n')
    with pytest.raises(ConfigError, match=r"ended before its first checkpoint.*--save-every"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="is not empty") as told, run_folder(tmp_path):
        pass
    assert "--resume" not in str(told.value)  # it would say that there is nothing to go on from


def test_run_that_was_killed_while_it_loaded_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()  # it stands there before the options do
    with pytest.raises(ConfigError, match=r"ended before its first checkpoint.*another --out"):
        read_config(tmp_path)


def test_run_that_another_process_trains_is_in_use_before_it_has_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with hold_folder(tmp_path), pytest.raises(ConfigError, match=f"is in use: process {os.getpid()}"):
        read_config(tmp_path)


def test_damaged_state_is_an_error(tmp_path: Path) -> None:
    saved = save(tmp_path, STATE, write, keep=2)
    (saved / "state.json").write_text('{"step": ')
    with pytest.raises(ConfigError, match=r"state\.json can't be read"):
        read_state(saved)


def test_other_identity_is_an_error_with_both_values(tmp_path: Path) -> None:
    check_identity(STATE, {"seed": 0}, tmp_path)
    with pytest.raises(ConfigError, match="seed = 0, not 1"):
        check_identity(STATE, {"seed": 1}, tmp_path)
    with pytest.raises(ConfigError, match=r"its data changed since it was started[.] Restore the data, or start again"):
        check_identity(STATE, {"seed": 0, "data": "def"}, tmp_path)  # a digest says nothing to a reader


def test_another_scale_of_adapters_is_another_run(tmp_path: Path) -> None:
    """Each backend would go on, from a policy that nobody trained."""
    asked = {"command": "agent", "model": "m", "data": "d", "lora_rank": 4}
    state = replace(STATE, identity=identity_of(TrainConfig(**asked), []))
    check_identity(state, identity_of(TrainConfig(**asked, lora_alpha=8.0), []), tmp_path)
    with pytest.raises(ConfigError, match=r"lora_alpha = 8\.0, not 64\.0"):
        check_identity(state, identity_of(TrainConfig(**asked, lora_alpha=64.0), []), tmp_path)


def test_only_the_newest_can_be_gone_on_from_where_older_ones_are_stripped(tmp_path: Path) -> None:
    def whole(folder: Path) -> None:
        write(folder)
        (folder / "moments").write_text("m")

    def strip(folder: Path) -> None:
        (folder / "moments").unlink(missing_ok=True)

    for step in (1, 2, 3):
        save(tmp_path, replace(STATE, step=step), whole, keep=2, strip=strip)
    older, newest = (tmp_path / "checkpoints" / name for name in steps(tmp_path))
    assert [path.name for path in older.iterdir() if path.name != "state.json"] == ["weights"]
    assert (newest / "moments").exists()
    check_resumable(read_state(newest), newest)
    with pytest.raises(ConfigError, match="only weights"):
        check_resumable(read_state(older), older)
    save(tmp_path, replace(STATE, step=4), whole, keep=2, strip=strip)
    assert steps(tmp_path) == ["step-000003", "step-000004"]  # stripping made none younger


def test_folder_of_a_run_is_named_after_the_day_and_never_shared(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with run_folder(None) as first, run_folder(None) as second:
        assert second.name == f"{first.name}-2"


def test_a_folder_in_which_another_process_trains_is_refused_and_left_alone(tmp_path: Path) -> None:
    with run_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")  # begun, and no step taken yet: nothing to resume, all to lose
        (folder / "metrics.jsonl").write_text("")
        with pytest.raises(ConfigError, match=rf"in use: process {os.getpid()} on .* uses it"), run_folder(folder):
            pass
        with pytest.raises(ConfigError, match="in use"), hold_folder(folder):
            pass
        assert (folder / "metrics.jsonl").exists()
    with hold_folder(folder):
        pass


def test_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"), run_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("inner", ["second", "checkpoints/mine/second"])
def test_folder_in_that_of_another_run_is_refused_and_not_made(tmp_path: Path, inner: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=f"is inside the run folder {tmp_path}"), run_folder(tmp_path / inner):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.jsonl"]


def test_folder_of_a_run_that_never_took_a_step_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "val", "step": 0}\n')
    with run_folder(tmp_path) as folder:
        assert not any(path.name[0] != "." for path in folder.iterdir())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 0}\n')
    with pytest.raises(ConfigError, match="is not empty"), run_folder(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can't be made"), run_folder(tmp_path / "out"):
        pass
