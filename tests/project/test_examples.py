"""The examples' own parts: problems that can be solved, queries that can do no harm, tables of what was measured."""

from __future__ import annotations

import importlib.util
import random
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(path: str) -> ModuleType:
    name = f"example_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


database = load("text_to_sql/database.py")


def test_every_question_has_a_query_that_works() -> None:
    draw = random.Random(0)
    for _ in range(200):
        problem = database.problem(draw)
        table = problem["question"].split("(")[0].removeprefix("Table ")
        assert table in problem["query"]
        assert isinstance(database.execute(problem["query"]), list)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("there are 12", "not a SELECT"),
        ("SELECT name FROM cars", "no such table: cars"),
        ("SELECT nme FROM film", "no such column"),
        ("DELETE FROM car", "not a SELECT"),
        ("SELECT 1 FROM car a, car b, car c, car d, car e, car f, car g ORDER BY random()", "interrupted"),
    ],
)
def test_queries_that_are_wrong_or_run_away_say_so(text: str, words: str) -> None:
    with pytest.raises(database.QueryError, match=words):
        database.execute(text)


def test_tables_can_only_be_read() -> None:
    import sqlite3

    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.database().execute("DELETE FROM car")
    assert database.execute("select count(*) from car; DROP TABLE car") == ["(12,)"]


def test_measured_runs_are_kept_drawn_and_tabled(tmp_path: Path) -> None:
    curves = load("curves.py")
    runs = [
        curves.Run(
            setup=setup, seed=seed, curves={"reward": [0.1, None, 0.9]}, before={"reward": 0.1}, after={"reward": 0.9},
            seconds=10.0, cpu_seconds=20.0,
        )
        for setup in ("alone", "together")
        for seed in (1, 0)
    ]  # fmt: skip
    curves.draw(runs, {"reward": "right"}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert curves.table(runs, ()).splitlines()[2] == "| alone | 0 | 0.10 to 0.90 | 20 | 10 |"


def test_ctrl_c_ends_the_demo_without_a_traceback(tmp_path, monkeypatch) -> None:
    from lightning_trainer import models

    def interrupt(_model: str) -> None:
        raise KeyboardInterrupt

    folder = EXAMPLES / "calculator"
    monkeypatch.setattr(models, "resolve", interrupt)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "run")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(SystemExit, match="stopped"):
        runpy.run_path(str(folder / "demo.py"), run_name="__main__")


def test_no_training_question_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "text_to_sql" / "database.py"), run_name="__main__")
    held_out, learned = (set(Path(f"{name}.jsonl").read_text().splitlines()) for name in ("val", "train"))
    assert len(Path("train.jsonl").read_text().splitlines()) == 160
    assert held_out
    assert not learned & held_out
