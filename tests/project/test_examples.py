"""The examples' own parts: problems that can be solved, queries that can do no harm, tables of what was measured."""

from __future__ import annotations

import importlib.util
import json
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
        ("SELECT zeroblob(20000) FROM car", "too big"),
        ("SELECT hex(zeroblob(4999)), hex(zeroblob(4999)) FROM car a, car b", "more than 1,000,000 bytes"),
        ("SELECT * FROM pragma_hard_heap_limit", "not authorized"),
        ("SELECT 1 FROM car a, car b, car c, car d, car e, car f, car g ORDER BY random()", "interrupted"),
    ],
)
def test_queries_that_are_wrong_or_run_away_say_so(text: str, words: str) -> None:
    with pytest.raises(database.QueryError, match=words):
        database.execute(text)


def test_tables_can_only_be_read() -> None:
    import sqlite3

    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
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


class TrainingBegan(Exception):
    """In place of a training."""


MEASURED = (
    *("calculator/policies", "calculator/tool_rewards", "teams/measure"),
    *(f"text_to_sql/{name}" for name in ("measure", "teacher", "order", "methods")),
)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Give a function that runs a measured example, with an end as soon as it writes questions to train on."""

    def begin(*_args: object, **_options: object) -> None:
        raise TrainingBegan

    def run(example: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [example, "--seeds", "0", *words])
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")

    monkeypatch.chdir(tmp_path)  # the examples change it
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    import curves

    for name in ("draw", "draw_held_out", "publish"):
        monkeypatch.setattr(curves, name, lambda *_args: None)
    for name in ("database", "problems"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(write=begin, problems=begin))
    return run


@pytest.mark.parametrize("example", MEASURED)
def test_published_results_are_those_of_the_default_options_alone(
    example: str, measure: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    published = EXAMPLES / f"{example}.jsonl"
    before = published.read_text()
    for other in (["--model", "another"], ["--learning-rate", "1"], ["--results", str(tmp_path / "own.jsonl")]):
        with pytest.raises(TrainingBegan):
            measure(example, *other)
    with pytest.raises(SystemExit, match=r"has results of .*another.*--results"):
        measure(example, "--model", "another", "--results", str(published))
    if example == "text_to_sql/teacher":  # measured before its questions changed
        with pytest.raises(SystemExit, match=r"teacher\.jsonl' has results of .*2d90db5d.*--results"):
            measure(example)
    else:
        capsys.readouterr()
        measure(example)
        assert f"runs are in '{published}' and are not measured again" in capsys.readouterr().err
    assert published.read_text() == before


def test_the_options_of_a_file_decide_where_results_go(measure: Callable[..., None]) -> None:
    with pytest.raises(TrainingBegan):
        measure("teams/measure", "--config", "gpu.toml")


def test_results_of_different_options_are_not_mixed(tmp_path: Path) -> None:
    curves = load("curves.py")
    run = {"setup": "alone", "seed": 0, "curves": {}, "before": {}, "after": {}, "seconds": 1.0}
    results = tmp_path / "own.jsonl"
    lines = [json.dumps(each) + "\n" for each in (run, {**run, "options": {"steps": 1}})]
    results.write_text(lines[0])
    assert len(curves.read(results)) == 1
    results.write_text("".join(lines))
    with pytest.raises(SystemExit, match="--results"):
        curves.read(results)


def test_own_results_leave_page_and_picture_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = load("curves.py")
    published, own = tmp_path / "published.jsonl", tmp_path / "own.jsonl"

    def given(*words: str) -> tuple[object, object, object]:
        monkeypatch.setattr(sys, "argv", ["measure.py", *words])
        args = curves.arguments({"alone": {}}, published, steps=8, description="", picture=tmp_path / "published.png")
        return args.results, args.readme, args.picture

    assert given("--steps", "8") == (published, tmp_path / "README.md", tmp_path / "published.png")
    assert given("--results", str(own)) == (own, None, tmp_path / "own.png")
    results, readme, picture = given("--steps", "9")
    assert results.parent == tmp_path / "experiments"
    assert (readme, picture) == (None, results.with_suffix(".png"))
    assert given("--steps", "10")[0] != results
