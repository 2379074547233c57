"""Data sets in the usual shapes, and what is said of others."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_spans.errors import DataError
from lightning_trainer.kits.export.wanted import UnexportedReason
from lightning_trainer.kits.sft.batches import agent_reader, batches, split_held_out
from lightning_trainer.kits.sft.data import conversation, read_file
from lightning_trainer.kits.sft.pairs import read_pair, read_pairs

USER, DONE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [USER, DONE]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": [USER], "completion": [DONE]},
        {"instruction": "hi", "input": "", "output": "hello"},
        {"messages": [{**USER, "tool_calls": None}, {**DONE, "name": None}], "tools": None},
    ],
)
def test_the_usual_shapes_are_one(line: dict[str, Any]) -> None:
    found = conversation(line, "here")
    assert (found.messages, found.answers) == ((USER, DONE), (1,))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"question": "a", "answer": "b"}, "the fields answer, question. Expected: messages"),
        ({"messages": "hi"}, "Expected"),
        ({"prompt": "hi"}, "the fields prompt. Expected: messages"),
        ({"conversations": [{"from": "moon", "value": "x"}]}, "'moon'"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 labels"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, DONE]}, "more than text"),
    ],
)
def test_what_has_not_the_fields_is_told_with_its_line(
    tmp_path: Path, line: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [USER, DONE]}) + "\n" + json.dumps(line) + "\n")
    assert len(read_file(path, Counter())) == 1, "one bad row does not reject a file"
    assert "1 of 2 rows are left out. line 2: " in caplog.text
    assert told in caplog.text
    path.write_text("\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match="line 2") as error:
        read_file(path, Counter())
    assert told in str(error.value)


SILENT_LINES = [
    {"messages": [USER]},
    {"messages": []},
    {"messages": None},
    {"messages": [USER, {**DONE, "weight": 0}]},
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "hi"}]},
    {"messages": [USER, {"role": "assistant", "content": None}]},
    {"messages": [USER, {"role": "assistant", "content": [], "tool_calls": []}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": ""}]},
    {"prompt": "hi", "completion": ""},
    {"prompt": "hi", "completion": None},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]},
    {"instruction": "hi", "input": "", "output": ""},
]


@pytest.mark.parametrize("line", SILENT_LINES)
def test_a_conversation_without_an_answer_is_left_out_and_counted(tmp_path: Path, line: dict[str, Any]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (line, {"messages": [USER, DONE]}, line)))
    found = read_file(path, left_out := Counter())
    assert [example.source for example in found] == [f"{path}, line 2"]
    assert left_out == {"the assistant says nothing in it": 2}


def test_a_file_in_which_the_assistant_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in SILENT_LINES))
    with pytest.raises(DataError, match="line 1: the assistant says nothing in it: the fields messages"):
        read_file(path, Counter())


def test_a_row_of_parquet_without_an_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = [{"prompt": "hi", "completion": said} for said in ("hello", None)]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "data.parquet")
    assert len(read_file(tmp_path / "data.parquet", left_out := Counter())) == 1
    assert left_out == {"the assistant says nothing in it": 1}


@pytest.mark.parametrize("name", ["none.jsonl", "folder", "data.txt", "empty.jsonl", "bad.jsonl", "list.json"])
def test_files_that_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for other, text in {"data.txt": "x", "empty.jsonl": "\n", "bad.jsonl": "{", "list.json": "{}"}.items():
        (tmp_path / other).write_text(text)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        read_file(tmp_path / name, Counter())


def test_parquet_is_read_without_what_other_lines_fill_in(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "ab"]
    lines = [{"messages": [USER, {**DONE, "tool_calls": [call]}]} for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist([*lines, {"messages": [USER, DONE]}]), tmp_path / "data.parquet")
    found = read_file(tmp_path / "data.parquet", Counter())
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"b": 1}
    assert found[2].messages == (USER, DONE)
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(DataError, match="can't be read"):
        read_file(tmp_path / "bad.parquet", Counter())


@pytest.mark.parametrize("shape", ["messages", "conversations", "completion", "pair"])
def test_what_is_null_in_arguments_and_tools_stays_so(tmp_path: Path, shape: str) -> None:
    given = {"city": "Paris", "unit": None}
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    line = {
        "messages": {"messages": [USER, said]},
        "conversations": {"conversations": [USER, said]},
        "completion": {"prompt": [USER], "completion": [said]},
        "pair": {"prompt": [USER], "chosen": [said], "rejected": [DONE]},
    }[shape]
    (tmp_path / "data.jsonl").write_text(json.dumps({**line, "tools": tools}))
    path = tmp_path / "data.jsonl"
    found = read_pairs(path)[0].chosen if shape == "pair" else read_file(path, Counter())[0]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == given
    assert found.tools == tuple(tools)


def test_what_is_null_in_json_of_a_parquet_file_stays_so(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    call = {"function": {"name": "f", "arguments": '{"unit": null}'}}
    line = {"messages": [USER, {**DONE, "tool_calls": [call]}], "tools": json.dumps(tools)}
    parquet.write_table(pyarrow.Table.from_pylist([line]), tmp_path / "data.parquet")
    (found,) = read_file(tmp_path / "data.parquet", Counter())
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"unit": None}
    assert found.tools == tuple(tools)


def test_turns_of_sharegpt_that_call_functions_are_tool_calls() -> None:
    call, big = {"name": "f", "arguments": {"x": 2**70}}, "1180591620717411303424"
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": f'{{"name": "f", "arguments": {{"x": {big}}}}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "hello"},
    ]
    found = conversation({"conversations": turns, "tools": '[{"name": "f", "parameters": {}}]'}, "here")
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert [made["function"] for made in found.messages[1]["tool_calls"]] == [call]
    assert found.answers == (1, 3)
    assert found.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    with pytest.raises(DataError, match="a name and arguments"):
        conversation({"conversations": [{"from": "function_call", "value": "[]"}]}, "here")


def test_columns_of_other_types_do_not_matter_and_json_is_read(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    said = {**DONE, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2**70, "unit": None}}}]}
    messages = pyarrow.array([[json.dumps(message) for message in (USER, said)]])
    table = pyarrow.table({"messages": messages, "made": [dt.datetime(2026, 1, 1)]})
    features = {"messages": {"_type": "List", "feature": {"_type": "Json"}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "data.parquet")
    (found,) = read_file(tmp_path / "data.parquet", Counter())
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2**70, "unit": None}


@pytest.mark.parametrize(
    "line",
    [
        {"system": "Be kind.", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"system": "Be kind.", "messages": [USER, DONE]},
        {"system": "Be kind.", "prompt": "hi", "completion": "hello"},
        {"system": "Be kind.", "instruction": "hi", "output": "hello"},
    ],
)
def test_a_system_prompt_beside_the_turns_is_told(line: dict[str, Any]) -> None:
    found = conversation(line, "here")
    assert (found.messages, found.answers) == (({"role": "system", "content": "Be kind."}, USER, DONE), (2,))


def test_turns_before_an_instruction_are_told() -> None:
    found = conversation({"instruction": "more", "output": "ok", "history": [["hi", "hello"]]}, "here")
    assert [message["content"] for message in found.messages] == ["hi", "hello", "more", "ok"]
    assert found.answers == (3,)  # what was said before is context, and no answer of this line


def test_an_answer_of_weight_0_is_not_learned() -> None:
    found = conversation({"messages": [USER, {**DONE, "weight": 0}, USER, {**DONE, "weight": 1}]}, "here")
    assert found.answers == (3,)


def test_an_empty_answer_is_not_learned_but_a_call_of_a_tool_is() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    found = conversation({"messages": [USER, {**DONE, "content": ""}, USER, called, USER, DONE]}, "here")
    assert found.answers == (3, 5)


def test_a_folder_of_a_data_set_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "set" / "data" / "train-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"It holds data/train-00000-of-00001\.parquet"):
        read_file(tmp_path / "set", Counter())


def test_data_without_agents_is_of_the_one_that_is_named() -> None:
    data = [conversation({"messages": [USER, DONE]}, "here")]
    assert agent_reader(data, ("writer",))(data[0]) == "writer"
    assert agent_reader(data, None)(data[0]) is None
    with pytest.raises(DataError, match="could belong to any of writer, rewriter"):
        agent_reader(data, ("writer", "rewriter"))


def test_a_group_and_a_question_are_held_out_whole() -> None:
    lines = [{"messages": [{**USER, "content": f"q{n % 60}"}, DONE], "group_id": f"g{n // 2}"} for n in range(120)]
    data = [conversation(line, "here") for line in lines]
    training, out = split_held_out(data, 0.2, left_out := Counter())
    assert len(training) + len(out) == 120
    assert not left_out
    assert 10 <= len(out) <= 50
    for part in ({one.group for one in training} & {one.group for one in out},):
        assert not part
    assert not {one.messages[0]["content"] for one in training} & {one.messages[0]["content"] for one in out}


def test_a_task_of_several_runs_is_held_out_whole() -> None:
    def lines(run: int) -> list[dict[str, Any]]:
        said = [[{**USER, "content": f"run {run}, task {task}"}, DONE] for task in range(60)]
        return [{"messages": m, "group_id": f"r{run}.{task}", "task_id": f"t{task}"} for task, m in enumerate(said)]

    data = [conversation(line, "here") for run in range(3) for line in lines(run)]
    training, out = split_held_out(data, 0.2, left_out := Counter())
    assert len(training) + len(out) == 180
    assert not left_out
    assert 12 <= len(out) <= 90
    assert not {one.task for one in training} & {one.task for one in out}


@pytest.mark.parametrize("name", ["task_id", "group_id"])
def test_a_task_and_a_group_with_a_number_are_held_out_whole(name: str) -> None:
    lines = [{"messages": [{**USER, "content": f"q{number}"}, DONE], name: number % 40} for number in range(200)]
    training, out = split_held_out([conversation(line, "here") for line in lines], 0.2, Counter())
    parts = [{int(one.messages[0]["content"][1:]) % 40 for one in part} for part in (training, out)]
    assert all(parts)
    assert not parts[0] & parts[1]


def test_what_is_held_out_but_asked_in_training_is_counted() -> None:
    lines = [{"messages": [{**USER, "content": "go on"}, DONE], "task_id": f"t{number}"} for number in range(60)]
    data = [conversation(line, "here") for line in lines]
    left_out: Counter[str] = Counter()
    training, out = split_held_out(data, 0.2, left_out)
    assert training
    assert len(training) + len(out) + left_out[UnexportedReason.SEEN_IN_TRAINING] == 60
    assert left_out[UnexportedReason.SEEN_IN_TRAINING] > 0


def test_every_epoch_takes_every_row_once() -> None:
    rows: Any = list(range(10))
    taken = [row for batch in batches(rows, 4, 5, seed=3) for row in batch]
    assert [sorted(taken[:10]), sorted(taken[10:])] == [list(range(10))] * 2
    assert taken[:10] != taken[10:]
    assert taken == [row for batch in batches(rows, 4, 5, seed=3) for row in batch]


def test_rows_of_one_beginning_are_drawn_together_and_cut_otherwise_in_each_epoch() -> None:
    rows: Any = [SimpleNamespace(policy="policy", tokens=np.array([n % 5, n])) for n in range(40)]
    taken = [row for batch in batches(rows, 8, 10, seed=3, together=4) for row in batch]
    epochs = [[int(row.tokens[1]) for row in taken[part : part + 40]] for part in (0, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 2
    assert {frozenset(epochs[0][k : k + 4]) for k in range(0, 40, 4)} != {
        frozenset(epochs[1][k : k + 4]) for k in range(0, 40, 4)
    }
    changes = [sum(a % 5 != b % 5 for a, b in pairwise(epoch)) for epoch in epochs]
    assert max(changes) < 20  # alone they change four times of five


SYSTEM = {"role": "system", "content": "s"}
SAID: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": SAID, "answers": [7]},
        {"messages": SAID, "answers": [0]},
        {"messages": SAID, "answers": [1, 1]},
        {"messages": SAID, "reward": float("nan")},
        {"messages": SAID, "tools": {"type": "function"}},
        {"input_ids": [1, 2, 3], "labels": [-100, 9, 9]},
        {"input_ids": ["1", 2.5], "labels": [-100, 2]},
    ],
)
def test_a_line_that_says_something_else_than_it_holds_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="line 1: "):
        conversation(line, "f.jsonl, line 1")


def test_conversations_beside_their_prompt_hold_it_once() -> None:
    sides = {name: [SAID[0], {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    pair = read_pair({"prompt": "a", **sides}, "x")
    assert [len(pair.chosen.messages), pair.chosen.answers] == [2, (1,)]


def test_conversations_that_a_system_prompt_begins_hold_their_prompt_once() -> None:
    sides = {name: [SYSTEM, SAID[0], {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    pair = read_pair({"prompt": "a", **sides}, "x")
    assert (pair.chosen.messages, pair.chosen.answers) == ((*sides["chosen"],), (2,))
    assert (pair.rejected.messages, pair.rejected.answers) == ((*sides["rejected"],), (2,))


def test_a_pair_with_too_few_rewards_is_told() -> None:
    with pytest.raises(DataError, match="Expected: prompt"):
        read_pair({"prompt": "a", "chosen": "b", "rejected": "c", "rewards": [1]}, "x")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"prompt": "a", "rewards": [0.0, 1.0]}, "chosen earned 0 and rejected 1"),
        ({"prompt": "a", "rewards": [1.0]}, "not those of chosen and rejected"),
        ({"prompt": "a", "rewards": "10"}, "not those of chosen and rejected"),
        ({"prompt": "a", "rejected": None}, "None is neither text nor messages"),
        ({"question": "a"}, "do not answer the same prompt"),
        ({"chosen": SAID, "rejected": [{"role": "user", "content": "z"}, SAID[1]]}, "do not answer the same prompt"),
        (
            {
                "chosen": [{"role": "system", "content": "s"}, *SAID],
                "rejected": [{"role": "system", "content": "s"}, SAID[1]],
            },
            "do not answer the same prompt",
        ),
    ],
)
def test_a_line_that_is_no_pair_of_answers_to_one_prompt_is_refused(line: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{told}"):
        read_pair({"chosen": "b", "rejected": "c", **line}, "f.jsonl, line 1")


def test_a_pair_of_the_same_tokens_has_no_better_answer() -> None:
    line = {"prompt": "a", "chosen": "b", "rejected": "c", "prompt_ids": [1], "chosen_ids": [2]}
    assert read_pair({**line, "rejected_ids": [2]}, "x").same
    assert not read_pair({**line, "rejected_ids": [3]}, "x").same
    assert not read_pair({**line, "rejected": "b", "rejected_ids": [3]}, "x").same


def test_a_system_prompt_beside_a_pair_is_told() -> None:
    pair = read_pair({"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, "x")
    for side in (pair.chosen, pair.rejected):
        assert ([m["role"] for m in side.messages], side.answers) == (["system", "user", "assistant"], (2,))
