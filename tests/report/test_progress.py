from __future__ import annotations

import io
import math

import pytest

from lightning_trainer.report.progress import IMPORTING, ProgressDisplay, bar, duration, one_line, sparkline


def test_without_a_terminal_each_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("training writer") as progress:
        progress.begin(0, 2)
        progress.phase("rollouts", 1, 8)
        progress.step(0, {"reward": 0.25, "reward/writer": 0.5, "loss": 0.125, "unknown": 3.0})
        progress.note("held out after 1 steps: [reward] 0.5")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "training writer",
        "rollouts: 8 ...",
        "step 1/2  reward 0.250  writer 0.500  loss 0.1250",
        "held out after 1 steps: [reward] 0.5",
    ]


def test_without_a_terminal_a_long_wait_is_told_once_until_a_step_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressDisplay("training writer") as progress:
        progress.phase("loading smollm2-135m")
        for done in (0, 1, 2):
            progress.phase("rollouts", done, 64)
        progress.phase("learning from 7 rows")
        progress.step(0, {"reward": 0.25})
        progress.phase("rollouts", 0, 64)
        progress.phase("learning from 9 rows")
    said = ["training writer", "loading smollm2-135m ...", "rollouts: 64 ...", "learning from 7 rows ..."]
    assert capsys.readouterr().err.splitlines()[:-1] == said


def test_without_a_terminal_a_long_wait_is_told_again_with_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_trainer.report.progress._LINE_S", -1.0)
    with ProgressDisplay("running agent:run") as progress:
        for done in range(3):
            progress.phase("tasks", done, 2)
    lines = capsys.readouterr().err.splitlines()
    assert (lines[1], lines[2].split(" (")[0], len(lines)) == ("tasks: 2 ...", "tasks: 1 of 2", 3)


def test_a_program_that_is_refused_without_a_terminal_is_told_in_the_error_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressDisplay("training writer") as progress:
        progress.phase(IMPORTING)
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_before_anything_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="refused"), ProgressDisplay("training writer"):
        raise ValueError("refused")
    assert capsys.readouterr().err == ""


def test_live_panel_shows_where_the_run_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    progress = ProgressDisplay("training writer")
    progress.begin(3, 10)
    progress.phase("rollouts", 16, 64)
    progress.step(3, {"reward": 0.25, "loss": 0.5})
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(progress._panel())
    text = console.export_text()
    for words in ("training writer", "step 5 of 10", "rollouts 16 of 64", "reward 0.250", "loss 0.5000"):
        assert words in text


def test_small_drawings() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0] * 100, width=10) == "▁" * 10
    assert sparkline([0.0, math.nan, 0.5, math.inf, 1.0]) == "▁ ▅ █"
    assert sparkline([math.nan]) == " "
    assert bar(1, 4, width=8) == "━━"
    assert bar(9, 4, width=8) == "━" * 8
    assert bar(0, 0) == ""
    assert (duration(59.6), duration(61), duration(3723)) == ("1:00", "1:01", "1:02:03")
    assert one_line({"loss": 1.0}) == "loss 1.0000"
    huge = one_line({"reward": 1e300, "reward/writer": -1e300, "loss": 1.0})
    assert huge == "reward 1e+300  writer -1e+300  loss 1.0000"


def test_alarms_stand_in_the_panel_and_are_said_once_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    with ProgressDisplay("training writer") as progress:
        for _ in range(2):
            progress.alarms(["The entropy has fallen."])
    assert capsys.readouterr().err.splitlines() == ["training writer", "ALARM: The entropy has fallen."]
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(progress._panel())
    assert "The entropy has fallen." in console.export_text()


def test_ctrl_c_says_at_once_what_is_waited_for_and_what_a_second_one_does(capfd: pytest.CaptureFixture[str]) -> None:
    shown = ProgressDisplay("training")
    shown.phase("learning from 64 rows")
    shown.stopping()
    assert "learning from 64 rows must finish first" in (said := capfd.readouterr().err)
    assert "Press Ctrl-C again to quit now and lose everything after the last checkpoint" in said
    shown.phase("rollouts", 3, 64)
    shown.stopping()
    assert "rollouts (3 of 64) will be cancelled, then the weights are saved" in capfd.readouterr().err
    shown.phase("saving")
    shown.stopping()
    assert "saving must finish first. Press" in capfd.readouterr().err
    shown.phase("learning", 4, 8)
    shown.stopping()
    assert "learning (step 5 of 8) must finish first, then the weights are saved" in capfd.readouterr().err
    shown.phase("samples of gpt-9", 3, 64)
    shown.stopping()
    assert "samples of gpt-9 (3 of 64) will be cancelled. Press Ctrl-C again to quit now.\n" in capfd.readouterr().err
