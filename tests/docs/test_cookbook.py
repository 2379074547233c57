"""The ten rewards of docs/how-to/rewards.md, on good answers, bad ones, and nonsense."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.schema.rewards import as_rewards

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "rewards.md").read_text(encoding="utf-8")
SNIPPET = r"<!-- snippet: tests/docs/cookbook.py:([\w-]+) -->\n```python\n(.*?)```"
PARTS = dict(re.findall(SNIPPET, PAGE, flags=re.DOTALL))


def copied(part: str) -> Any:
    """Return a reward from a module that has nothing but its part of the page."""
    module: dict[str, Any] = {}
    exec(PARTS[part], module)
    return module[part.replace("-", "_")]


cookbook = SimpleNamespace(**{part.replace("-", "_"): copied(part) for part in PARTS})


@pytest.mark.parametrize(
    ("name", "task", "result", "reward"),
    [
        ("exact", {"answer": "Paris"}, " paris. ", 1.0),
        ("exact", {"answer": "Paris"}, "It is Paris", 0.0),
        ("exact", {"answer": 7}, None, 0.0),
        ("number", {"answer": 1200}, "12 times 100 is 1,200.", 1.0),
        ("number", {"answer": -0.5}, "so x = -0.5", 1.0),
        ("number", {"answer": 12}, "12, or rather 13", 0.0),
        ("number", {"answer": 12}, "twelve", 0.0),
        ("overlap", {"answer": "a red lamp"}, "a red lamp", 1.0),
        ("overlap", {"answer": "a red lamp"}, "red lamp red lamp red", 0.5),
        ("overlap", {"answer": "a red lamp"}, "", 0.0),
        ("choice", {"kind": "refund"}, "Refund.", 1.0),
        ("choice", {"kind": "refund"}, "account", 0.3),
        ("choice", {"kind": "refund"}, "refund delivery account", 0.0),
        ("fields", {"fields": {"city": "Bern", "year": 2026}}, '{"city": "Bern", "year": "2026"}', 0.5),
        ("fields", {"fields": {"city": "Bern"}}, '["Bern"]', 0.0),
        ("fields", {"fields": {"city": "Bern"}}, "Bern", 0.0),
        ("brief", {"answer": "19"}, "It is 19.", 1.0),
        ("brief", {"answer": "19"}, "word " * 74 + "19", 0.5),
        ("brief", {"answer": "19"}, " ".join(map(str, range(1, 50))), 0.0),
        ("brief", {"answer": "19"}, "", 0.0),
        ("brief", {"answer": "19"}, "119", 0.0),
        ("grounded", {"source": "the lamp is red"}, 'It says "the lamp is" and "lamp is blue".', 0.5),
        ("grounded", {"source": "the lamp is red"}, 'Nothing to say: "e".', 0.0),
        ("grounded", {"source": "the lamp is red"}, "It is red.", 0.0),
    ],
)
def test_a_reward_is_what_the_page_says(name, task, result, reward):
    assert as_rewards(getattr(cookbook, name)(task, result)) == {None: pytest.approx(reward)}


def test_a_program_earns_the_assertions_that_hold():
    task = {"tests": ["assert double(2) == 4", "assert double(-1) == -2", "assert double('a') == 'aa'"]}
    assert cookbook.passes(task, "def double(x):\n    return x + x if x != 'a' else 'b'") == pytest.approx(2 / 3)
    assert cookbook.passes(task, "def double(x):\n    return x + x\nif __name__ == '__main__':\n    exit()") == 1.0


@pytest.mark.parametrize(
    "program", ["exit()", "import os\nos._exit(0)", "import sys\nsys.exit(1)", "print('\\n')\nexit()"]
)
def test_a_program_that_ends_before_the_assertions_earns_nothing(program):
    assert cookbook.passes({"tests": ["assert double(2) == 4"]}, program) == 0.0


def test_a_query_earns_what_it_finds_and_harms_nothing(tmp_path):
    database = sqlite3.connect(tmp_path / "shop.db")
    database.execute("create table sold (thing text, price int)")
    database.executemany("insert into sold values (?, ?)", [("lamp", 3), ("book", 5)])
    database.commit()
    database.close()
    task = {"database": tmp_path / "shop.db", "query": "select thing from sold"}
    assert cookbook.same_rows(task, "select thing from sold order by price desc") == 1.0
    assert cookbook.same_rows(task, "select price from sold") == 0.1
    for query in ("drop table sold", f"vacuum into '{tmp_path}/made.db'", "select 1; select 1", "select '\0'", None):
        assert cookbook.same_rows(task, query) == 0.0
    assert [file.name for file in tmp_path.iterdir()] == ["shop.db"]
    assert (
        cookbook.same_rows(task, "with recursive n(x) as (select 1 union all select x+1 from n) select * from n") == 0.0
    )
    assert cookbook.same_rows(task, "select thing from sold") == 1.0


@pytest.mark.parametrize(("said", "reward"), [("7", 0.7), (" 10\n", 1.0)])
def test_a_judge_is_asked_at_its_own_endpoint(said, reward, monkeypatch):
    with judge(said, monkeypatch):
        assert cookbook.judged({"question": "2+2"}, "4") == reward


@pytest.mark.parametrize("said", ["I refuse", "11", "7/10", ""])
def test_a_judge_that_answers_nonsense_is_an_error_and_no_zero(said, monkeypatch):
    with judge(said, monkeypatch), pytest.raises(ValueError, match="the judge said"):
        cookbook.judged({"question": "2+2"}, "4")


def judge(said, monkeypatch):
    server = ScriptedServer(lambda body, seen: Reply(said))
    monkeypatch.setenv("JUDGE_URL", server.url)
    monkeypatch.setenv("JUDGE_KEY", "k")
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    return server


def test_the_page_shows_ten_rewards_and_each_that_is_there():
    file = Path(__file__).with_name("cookbook.py").read_text(encoding="utf-8")
    assert len(PARTS) == 10
    assert re.findall(r"--8<-- \[start:([\w-]+)\]", file) == list(PARTS)
