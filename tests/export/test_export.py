"""Exports: what is in a line, what is left out and counted, and what is held out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lightning_conformance.stores.samples import a_span
from lightning_spans.errors import ConfigError, DataError, UnknownAgentError
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import ABANDONED, REQUEST, RESPONSE
from lightning_spans.terms import CONSENT, GRANTED
from lightning_trainer.cli import cli
from lightning_trainer.kits.export import choose, files
from lightning_trainer.kits.export import episodes as room
from lightning_trainer.kits.export.candidates import LineCandidate
from lightning_trainer.kits.export.export import ExportResult, export
from lightning_trainer.kits.export.wanted import ExportSelection
from lightning_trainer.rl.endings import Ending
from support.training.stores import ADD, Made, Said, calls_tool, make_store, read, says, user


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = make_store(tmp_path)
    yield made
    made.store.close()


def run(made: Made, out: Path, **wanted: Any) -> tuple[list[dict[str, Any]], ExportResult]:
    done = export(made.store, ExportSelection(**{"format": "sft", **wanted}), out)
    return read(out), done


def two_turns(made: Made, reward: float = 1.0, *, tokens: bool = True, **where: Any) -> str:
    """A tool call and the answer to it, after an example turn that nobody said here."""
    asked = [user("1+1?"), says("2"), user("2+3?")]
    first = Said(asked, calls_tool("a", x=2, y=3), tools=[ADD], prompt=(1, 2, 3), response=(4, 5))
    later = [*asked, calls_tool("a", x=2, y=3), {"role": "tool", "tool_call_id": "a", "content": "5"}]
    second = Said(later, says("five"), tools=[ADD], prompt=(1, 2, 3, 4, 5, 6, 7), response=(8, 9))
    if not tokens:
        for said in (first, second):
            said.prompt = said.response = None
    return made.attempt({"q": "2+3"}, [first, second], reward, **where)


# What a line holds.


@pytest.mark.parametrize("kind", ["sft", "dpo", "tokens"])
def test_a_task_has_one_name_in_every_run(made: Made, tmp_path: Path, kind: str) -> None:
    for run_ in ("one", "other"):
        for task in ("a", "b"):
            ids = (len(run_), ord(task))
            for reward, text in ((1.0, "yes"), (0.0, "no")):
                said = Said([user(f"{task} in {run_}")], says(text), prompt=ids, response=(3 + int(reward),))
                made.attempt({"q": task}, [said], reward, group=f"{run_}-{task}")
    lines, _ = run(made, tmp_path / "out.jsonl", format=kind, **({} if kind == "dpo" else {"best": 1}))
    tasks = {line["group_id"]: line["task_id"] for line in lines}
    assert len(tasks) == 4
    assert tasks["one-a"] == tasks["other-a"] != tasks["one-b"] == tasks["other-b"]


def test_calls_that_go_on_share_a_line_with_exact_tokens(made: Made, tmp_path: Path) -> None:
    attempt = two_turns(made)
    [line], done = run(made, tmp_path / "out.jsonl")
    assert line["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert line["labels"] == [-100, -100, -100, 4, 5, -100, -100, 8, 9]
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert line["answers"] == [3, 5]  # not the example at 1
    assert line["messages"][3]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 2, "y": 3}}
    assert json.loads(line["tools"]) == [ADD]
    assert (line["agent"], line["reward"], line["rollout_id"], line["attempt_id"]) == ("writer", 1.0, "r1", attempt)
    assert (len(line["span_ids"]), line["policy"], line["policy_version"]) == (2, "policy", 0)
    assert (done.lines, done.left_out, done.with_tokens) == (1, {}, 1)


def test_without_tokens_messages_say_what_goes_on(made: Made, tmp_path: Path) -> None:
    two_turns(made, tokens=False)
    [line], done = run(made, tmp_path / "out.jsonl")
    assert "input_ids" not in line
    assert line["answers"] == [3, 5]
    assert done.with_tokens == 0


def test_tokens_are_never_made_again(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    made.attempt({"q": "x"}, [Said([user("x")], says("y"))], 1.0)
    made.attempt({"q": "z"}, [Said([user("z")], says(""), prompt=(1,), response=(3,), temperature=0.0)], 1.0)
    lines, done = run(made, tmp_path / "out.jsonl", format="tokens")
    assert [line["input_ids"] for line in lines] == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 3]]
    assert lines[1]["labels"] == [-100, 3]  # what was drawn greedily can be learned from, too
    assert not {"messages", "tools"} & set(lines[0])
    assert done.left_out == {"no tokens recorded": 1}


def test_a_call_of_other_weights_begins_a_line(made: Made, tmp_path: Path) -> None:
    said = [Said([user("x")], says("y"), prompt=(1,), response=(2,))]
    said.append(Said([user("x"), says("y"), user("z")], says("u"), prompt=(1, 2, 3), response=(4,), version=1))
    made.attempt({}, said, 1.0)
    lines, _ = run(made, tmp_path / "out.jsonl", format="tokens")
    assert [(line["input_ids"], line["policy_version"]) for line in lines] == [([1, 2], 0), ([1, 2, 3, 4], 1)]


def test_traces_of_production_are_conversations_without_a_reward(made: Made, tmp_path: Path) -> None:
    request = {"model": "big", "input": [user("hi")], "instructions": "Be brief."}
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}]
    body = {"id": "resp", "status": "completed", "output": output}
    attributes = {REQUEST: json.dumps(request), RESPONSE: json.dumps(body), CONSENT: GRANTED}
    made.store.add_spans([a_span(operation="chat", agent="writer", origin="live", attributes=attributes)])
    two_turns(made)
    [line], _ = run(made, tmp_path / "out.jsonl", origin="live")
    assert line["messages"] == [{"role": "system", "content": "Be brief."}, user("hi"), says("hello")]
    assert (line["reward"], line["origin"], line["answers"]) == (None, "live", [2])


def test_a_call_with_other_tools_begins_a_line_with_its_own(made: Made, tmp_path: Path) -> None:
    first = Said([user("2+3?")], calls_tool("a", x=2, y=3), tools=[ADD])
    later = [user("2+3?"), calls_tool("a", x=2, y=3), {"role": "tool", "tool_call_id": "a", "content": "5"}]
    made.attempt({}, [first, Said(later, says("five"))], 1.0)
    lines, _ = run(made, tmp_path / "out.jsonl")
    assert [(line["tools"] and json.loads(line["tools"]), line["answers"]) for line in lines] == [
        ([ADD], [1]),
        (None, [3]),
    ]


def test_an_answer_whose_thoughts_the_program_dropped_keeps_them(made: Made, tmp_path: Path) -> None:
    thought = {**says("4"), "reasoning_content": "2 and 2"}
    made.attempt({}, [Said([user("2+2?")], thought), Said([user("2+2?"), says("4"), user("sure?")], says("yes"))], 1.0)
    lines, _ = run(made, tmp_path / "out.jsonl")
    assert [(line["messages"][-1], line["answers"]) for line in lines] == [(thought, [1]), (says("yes"), [3])]


def test_thoughts_that_the_tokens_hold_stand_in_the_messages(made: Made, tmp_path: Path) -> None:
    thought = {**says("4"), "reasoning_content": "2 and 2"}
    later = [user("2+2?"), says("4"), user("sure?")]
    calls = [Said([user("2+2?")], thought, prompt=(1,), response=(2,))]
    made.attempt({}, [*calls, Said(later, says("yes"), prompt=(1, 2, 3), response=(4,))], 1.0)
    [line], _ = run(made, tmp_path / "out.jsonl")
    assert (line["messages"][1], line["answers"]) == (thought, [1, 3])


def test_answers_that_differ_in_their_thoughts_are_two(made: Made, tmp_path: Path) -> None:
    for thought in ("well", "hm"):
        made.attempt({}, [Said([user("2+2?")], {**says("4"), "reasoning_content": thought})], 1.0)
    lines, _ = run(made, tmp_path / "out.jsonl")
    assert [line["messages"][-1]["reasoning_content"] for line in lines] == ["well", "hm"]


def test_thoughts_are_read_by_vllms_newer_name(made: Made, tmp_path: Path) -> None:
    made.attempt({}, [Said([user("2+2?")], {**says("4"), "reasoning": "2 and 2"})], 1.0)
    [line], _ = run(made, tmp_path / "out.jsonl")
    assert line["messages"][-1] == {**says("4"), "reasoning_content": "2 and 2"}


def test_a_developers_message_is_the_systems_which_every_chat_template_knows(made: Made, tmp_path: Path) -> None:
    asked = [{"role": "developer", "content": "Be brief."}, user("2+2?")]
    made.attempt({}, [Said(asked, says("4"))], 1.0)
    made.attempt({}, [Said(asked, says("four"))], 0.0)
    [line, _], _ = run(made, tmp_path / "out.jsonl")
    assert line["messages"][0] == {"role": "system", "content": "Be brief."}
    [pair], _ = run(made, tmp_path / "pairs.jsonl", format="dpo")
    assert pair["prompt"][0] == {"role": "system", "content": "Be brief."}


# What is left out, and why.


def test_everything_left_out_is_counted_with_its_reason(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    made.attempt({"n": 1}, [Said([user("a")], says("b"))], 0.0)
    made.attempt({"n": 2}, [Said([user("c")], says("d"))])
    made.attempt({"n": 3}, [Said([user("e")], says("f"))], 1.0, status="failed")
    made.attempt({"n": 4}, [Said([user("g")], says("h"))], 1.0, mode="val")
    made.attempt({"n": 5}, [Said([user("i")], says("j"), finish="length")], 1.0)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    made.attempt({"n": 6}, [Said([image], says("k"))], 1.0)
    made.attempt({"n": 7}, [Said([user("l")], says(""))], 1.0)
    made.attempt({"n": 8}, [Said([user("m")], says("n"), agent="router")], 1.0)
    two_turns(made)
    lines, done = run(made, tmp_path / "out.jsonl", agents=("writer",), min_reward=0.5)
    assert len(lines) == 1
    assert done.left_out == {
        "a message contains more than text": 1,
        "agent not selected": 1,
        "answer truncated at max_tokens": 1,
        Ending.CRASHED.text: 1,
        "no answer recorded": 1,
        "no reward": 1,
        "of a validation: --validation takes these, too": 1,
        "reward below --min-reward": 1,
        "the same line is already in the file": 2,
    }


def test_best_of_each_group_and_agent(made: Made, tmp_path: Path) -> None:
    for group in "ab":
        for value in (0.2, 0.9, 0.5):
            said = [Said([user(group)], says(f"{value}")), Said([user("r")], says(f"{group}{value}"), agent="other")]
            own = [(1 - value, "other", "run")]
            made.attempt({"t": group}, said, group=group, rewards=[(value, "writer", "run"), *own])
    lines, done = run(made, tmp_path / "out.jsonl", best=1)
    kept = [(line["agent"], line["messages"][-1]["content"], line["reward"]) for line in lines]
    assert kept == [
        ("other", "a0.2", 0.8), ("writer", "0.9", 0.9), ("other", "b0.2", 0.8), ("writer", "0.9", 0.9),
    ]  # fmt: skip
    assert done.left_out == {"not among the best of its group": 8}


def test_rewards_of_the_sources_named_count(made: Made, tmp_path: Path) -> None:
    made.attempt({}, [Said([user("a")], says("b"))], 1.0, rewards=[(5.0, None, "tool_status"), (2.0, "x", "run")])
    assert run(made, tmp_path / "a.jsonl")[0][0]["reward"] == 6.0
    assert run(made, tmp_path / "b.jsonl", sources=("run",))[0][0]["reward"] == 1.0
    assert run(made, tmp_path / "c.jsonl", sources=("nobody",))[0][0]["reward"] is None


def test_a_reward_of_a_call_is_its_agents_alone(made: Made, tmp_path: Path) -> None:
    attempt = made.attempt({}, [Said([user("a")], says("b")), Said([user("c")], says("d"), agent="other")], 1.0)
    [first, _] = [line["span_ids"][0] for line in run(made, tmp_path / "a.jsonl")[0]]
    made.store.add_rewards([Reward(rollout_id="r1", attempt_id=attempt, value=0.5, span_id=first)])
    assert [line["reward"] for line in run(made, tmp_path / "b.jsonl")[0]] == [1.5, 1.0]


def test_nothing_to_export_is_an_error_that_leaves_no_file(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="has no model call"):
        run(made, out)
    two_turns(made, reward=0.0)
    with pytest.raises(DataError, match="2: reward below"):
        run(made, out, min_reward=1.0)
    with pytest.raises(UnknownAgentError, match="writer"):
        run(made, out, agents=("writter",))
    with pytest.raises(ConfigError, match="jsonl"):
        run(made, tmp_path / "out.csv")
    assert all(path.name.startswith("lightning.db") for path in tmp_path.iterdir())


def test_every_field_is_filled_in_at_the_beginning_from_which_readers_take_the_columns(
    made: Made, tmp_path: Path
) -> None:
    for n in range(3):
        made.attempt({"n": n}, [Said([user(f"{n}")], says("a"))], 1.0)
    two_turns(made)
    made.attempt({}, [Said([user("b")], says("c"), agent="other")], 1.0)
    made.attempt({"n": 4}, [Said([user("2+2?")], {**says("4"), "reasoning_content": "2 and 2"})], 1.0)
    lines, _ = run(made, tmp_path / "out.jsonl")
    assert [line["messages"][0]["content"] for line in lines] == ["0", "1+1?", "2+2?", "1", "2", "b"]


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    two_turns(made)
    run(made, out)
    before = out.read_bytes()
    with pytest.raises(DataError):
        run(made, out, min_reward=2.0)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".*part"))


def test_an_origin_that_nothing_has_is_named_with_those_that_are_there(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    with pytest.raises(DataError, match=r"of the origin 'live'\. It has: training"):
        run(made, tmp_path / "out.jsonl", origin="live")


def test_a_full_disk_leaves_both_files_as_they_were(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        made.attempt({"q": n}, [Said([user(f"q{n}")], says("x"))], 1.0, group=f"g{n}")
    run(made, tmp_path / "a.jsonl", held_out=0.5)
    before = {path: path.read_bytes() for path in tmp_path.glob("a*")}
    for n in range(6, 24):
        made.attempt({"q": n}, [Said([user(f"q{n}")], says("x"))], 1.0, group=f"g{n}")
    synced = iter((None, OSError(28, "No space left on device")))

    def fsync(_: int) -> None:
        if (error := next(synced, None)) is not None:
            raise error

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(ConfigError, match="No space left on device"):
        run(made, tmp_path / "a.jsonl", held_out=0.5)
    assert {path: path.read_bytes() for path in tmp_path.glob("*a*.jsonl*")} == before
    run(made, tmp_path / "a.jsonl", held_out=0.5)
    assert all(path.read_bytes() != text for path, text in before.items()), "with room both would have changed"


def test_what_a_killed_export_left_is_swept(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    gone = subprocess.Popen([sys.executable, "-c", ""])  # its number is nobody's after it was waited for
    gone.wait()
    left, others = tmp_path / f".out.jsonl.{gone.pid}.part", tmp_path / f".other.jsonl.{gone.pid}.part"
    for path in (left, others):
        path.write_text("{")
    with closing(files.Draft(tmp_path / "out.jsonl")) as writing:
        renamed = tmp_path / f".out.jsonl.{gone.pid + 1}.part"
        (tmp_path / f".out.jsonl.{os.getpid()}.part").rename(renamed)
        run(made, tmp_path / "out.jsonl")
        assert (left.exists(), others.exists(), renamed.exists(), writing.lines) == (False, True, True, 0)


def test_held_out_lines_of_before_are_not_left_beside_an_export_that_may_hold_them(made: Made, tmp_path: Path) -> None:
    for n in range(6):
        made.attempt({"q": n}, [Said([user(f"q{n}")], says("x"))], 1.0, group=f"g{n}")
    run(made, tmp_path / "a.jsonl", held_out=0.5)
    with pytest.raises(ConfigError, match=r"a\.held-out\.jsonl"):
        run(made, tmp_path / "a.jsonl")


# Held out by task.


def test_no_task_and_no_prompt_is_in_both_parts(made: Made, tmp_path: Path) -> None:
    for n in range(40):
        for member in range(2):  # the same task in two groups, under two ids
            said = [Said([user("constant")], says(f"{n}{member}"), agent="router"), Said([user(f"q{n}")], says("x"))]
            made.attempt({"q": n, "id": member}, said, 1.0, group=f"g{n}.{member}")
    training, done = run(made, tmp_path / "a.jsonl", held_out=0.3, task_fields=("q",))
    held_out = read(tmp_path / "a.held-out.jsonl")
    prompts = [{m["messages"][0]["content"] for m in part if m["agent"] == "writer"} for part in (training, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 40
    assert 4 <= len(prompts[1]) <= 20
    assert {line["agent"] for line in held_out} == {"writer"}  # the router's prompt is one that training has
    assert done.held_out == len(held_out)
    again, _ = run(made, tmp_path / "b.jsonl", held_out=0.3, task_fields=("q",))
    assert again == training


def test_a_validated_task_is_held_out(made: Made, tmp_path: Path) -> None:
    for n in range(6):
        made.attempt({"q": n}, [Said([user(f"q{n}")], says("x"))], 1.0, group=f"g{n}")
    made.attempt({"q": 3}, [Said([user("q3")], says("y"))], 1.0, group="v", mode="val")
    training, _ = run(made, tmp_path / "a.jsonl", held_out=0.0001)
    assert [line["messages"][0]["content"] for line in training] == ["q0", "q1", "q2", "q4", "q5"]
    assert {line["messages"][0]["content"] for line in read(tmp_path / "a.held-out.jsonl")} == {"q3"}


@pytest.mark.parametrize("kept", [{"min_reward": 0.5}, {"agents": ("writer",)}, {"best": 1}, {}])
def test_a_validated_task_is_held_out_whatever_becomes_of_the_validation(
    made: Made, tmp_path: Path, kept: dict[str, Any]
) -> None:
    for n in range(6):
        made.attempt({"q": n}, [Said([user(f"q{n}")], says("x"))], 1.0, group=f"g{n}")
    made.attempt({"q": 3}, [Said([user("other")], says("y"), agent="critic")], 0.0, group="v", mode="val")
    made.attempt({"q": 4}, [Said([user("other")], says("y"))], group="w", mode="val", status="failed")
    run(made, tmp_path / "a.jsonl", held_out=0.0001, **kept)
    held_out = {line["messages"][0]["content"] for line in read(tmp_path / "a.held-out.jsonl")}
    assert held_out - {"other"} == {"q3", "q4"}


def test_an_agent_may_be_silent_where_that_is_said_and_is_never_misspelt(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    made.attempt({"q": "b"}, [Said([user("b")], says("b"), agent="rewriter")], 1.0)
    with pytest.raises(UnknownAgentError):
        run(made, tmp_path / "out.jsonl", agents=("writer", "critic"))
    assert len(run(made, tmp_path / "out.jsonl", agents=("writer", "critic"), some_silent=True)[0]) == 1
    for wrong in (("writer", "rewritr"), ("critic",)):
        with pytest.raises(UnknownAgentError):
            run(made, tmp_path / "out.jsonl", agents=wrong, some_silent=True)


def test_a_field_that_no_task_has_splits_nothing(made: Made, tmp_path: Path) -> None:
    made.attempt({"db": "a", "q": 1}, [Said([user("q")], says("x"))], 1.0)
    with pytest.raises(ConfigError, match=r"no task has the field bd\. Fields of the tasks: db, q"):
        run(made, tmp_path / "a.jsonl", held_out=0.3, task_fields=("bd",))
    with pytest.raises(ConfigError, match="split-by"):
        run(made, tmp_path / "a.jsonl", task_fields=("db",))
    assert not (tmp_path / "a.jsonl").exists()


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3, st.booleans()), min_size=1, max_size=30), st.floats(0.05, 0.9))
def test_parts_share_no_group_no_task_no_prompt(drawn: list[tuple[int, int, int, bool]], share: float) -> None:
    candidates = [
        LineCandidate(
            place=place, calls=1, agent="a", reward=None, group=f"g{group}", attempt=str(place), task=f"t{task}",
            opening=None, validation=validation, prompt=f"p{prompt}", content=str(place),
        )
        for place, (group, task, prompt, validation) in enumerate(drawn)
    ]  # fmt: skip
    left_out: Any = choose.Counter()
    parts = choose.split(candidates, ExportSelection(format="sft", held_out=share), left_out)
    for name in ("group", "task", "prompt"):
        seen = [{getattr(each, name) for each in part} for part in (parts.training, parts.held_out)]
        assert not seen[0] & seen[1]
    assert not any(each.validation for each in parts.training)
    assert len(parts.training) + len(parts.held_out) + sum(left_out.values()) == len(candidates)


# Pairs.


def test_a_pair_is_the_best_and_the_worst_answer_to_one_prompt(made: Made, tmp_path: Path) -> None:
    for n, value in enumerate((0.5, 1.0, 0.0)):
        said = Said([user("q")], says(f"a{n}"), prompt=(1, 2), response=(3 + n, 9), tools=[ADD])
        alone = Said([user("q"), says(f"a{n}"), user("more")], says("b"))
        made.attempt({"q": 1}, [said, alone], value)
    [line], done = run(made, tmp_path / "out.jsonl", format="dpo")
    assert (line["prompt"], line["chosen"], line["rejected"]) == ([user("q")], [says("a1")], [says("a2")])
    assert (line["rewards"], line["agent"], json.loads(line["tools"])) == ([1.0, 0.0], "writer", [ADD])
    assert (line["prompt_ids"], line["chosen_ids"], line["rejected_ids"]) == ([1, 2], [4, 9], [5, 9])
    assert (line["chosen_from"]["rollout_id"], line["rejected_from"]["rollout_id"]) == ("r2", "r3")
    reasons = {"between the best and the worst of its prompt": 1, "its prompt has no other answer in its group": 3}
    assert done.left_out == reasons
    lines, _ = run(made, tmp_path / "all.jsonl", format="dpo", all_pairs=True)
    assert [line["rewards"] for line in lines] == [[1.0, 0.0], [1.0, 0.5], [0.5, 0.0]]
    lines, done = run(made, tmp_path / "few.jsonl", format="dpo", all_pairs=True, margin=0.8, ids=False)
    assert [(line["rewards"], "prompt_ids" in line) for line in lines] == [([1.0, 0.0], False)]
    assert done.left_out["difference in reward below --margin"] == 1


def test_no_pair_is_made_of_equal_rewards_or_equal_answers(made: Made, tmp_path: Path) -> None:
    for group, values, texts in (("tied", (1, 1), "ab"), ("same", (0, 1), "cc"), ("good", (0, 1), "de")):
        for value, text in zip(values, texts, strict=True):
            made.attempt({"g": group}, [Said([user(group)], says(text))], value, group=group)
    [line], done = run(made, tmp_path / "out.jsonl", format="dpo")
    assert (line["chosen"], line["rejected"]) == ([says("e")], [says("d")])
    tied, same = "no answer to its prompt earned another reward", "the better and the worse answer are the same"
    assert done.left_out == {tied: 2, same: 2}


@pytest.mark.parametrize("every", [False, True])
def test_a_pair_may_differ_by_exactly_the_margin(made: Made, tmp_path: Path, every: bool) -> None:
    for group, rewards in (("exact", (0.3, 0.1)), ("more", (0.5, 0.3)), ("close", (0.2, 0.1))):
        for value in rewards:
            made.attempt({"g": group}, [Said([user(group)], says(str(value)))], value, group=group)
    lines, done = run(made, tmp_path / "out.jsonl", format="dpo", margin=0.2, all_pairs=every)
    assert [line["rewards"] for line in lines] == [[0.3, 0.1], [0.5, 0.3]]
    assert done.left_out == {"difference in reward below --margin": 2}


# Spans, and the command.


def test_spans_have_openinferences_attributes_and_all_that_happened(made: Made, tmp_path: Path) -> None:
    two_turns(made, reward=0.25)
    made.attempt({}, [Said([user("x")], says("y"))], 1.0, status="failed")
    lines, done = run(made, tmp_path / "out.jsonl", format="openinference")
    assert [line["span_kind"] for line in lines] == ["LLM"] * 3  # viewers show what failed, too
    assert lines[0]["rewards"] == [{"source": "run", "agent": None, "value": 0.25}]
    assert set(lines[0]["context"]) == {"trace_id", "span_id"}
    lines, done = run(made, tmp_path / "out.jsonl", format="openinference", min_reward=0.5)
    assert (len(lines), done.left_out) == (1, {"reward below --min-reward": 2})


def test_the_commands_last_line_is_its_account(made: Made, tmp_path: Path) -> None:
    two_turns(made)
    made.attempt({}, [Said([user("x")], says("y"))], 1.0)
    arguments = ["export", "--store", str(tmp_path / "lightning.db"), "--format", "sft", str(tmp_path / "o.jsonl")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["lines"], told["left_out"], told["with_tokens"]) == (2, {}, 1)
    assert "need all or none" in result.stderr
    failed = CliRunner().invoke(cli, [*arguments, "--agents", "nobody"])
    assert (failed.exit_code, "nobody" in failed.stderr) == (2, True)


# What is no whole conversation.

CHAT: dict[str, Any] = {"messages": [user("hi")]}
DONE: dict[str, Any] = {"role": "assistant", "content": "hello"}


def live(made: Made, request: dict[str, Any], response: dict[str, Any], **more: Any) -> None:
    attributes = {REQUEST: json.dumps(request), RESPONSE: json.dumps(response), CONSENT: GRANTED, **more}
    made.store.add_spans([a_span(operation="chat", agent="writer", origin="live", attributes=attributes)])


def choice(message: dict[str, Any], reason: str | None = "stop") -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": reason}]}


def output(text: str, **more: Any) -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"id": "x", "status": "completed", "output": [said], **more}


INCOMPLETE: dict[str, Any] = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
FUNCTION_CALL: dict[str, Any] = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("request_", "response", "more", "reason"),
    [
        (CHAT, choice(DONE, None), {ABANDONED: True}, "the agent stopped reading the answer before its end"),
        (CHAT, choice(DONE, "content_filter"), {}, "answer cut by a content filter"),
        (CHAT, choice(DONE, "max_tokens"), {}, "answer truncated at max_tokens"),
        (CHAT, choice(DONE, "MAX_TOKENS"), {}, "answer truncated at max_tokens"),
        (CHAT, choice(DONE, "SAFETY"), {}, "answer cut by a content filter"),
        ({"input": "hi"}, output("he", **INCOMPLETE), {}, "answer truncated at max_tokens"),
        ({"input": "more", "previous_response_id": "r"}, output("hello"), {}, "its request refers to earlier messages"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, output("hello"), {}, "a tool or a call that is no"),
        ({"messages": [user("hi"), FUNCTION_CALL]}, choice(DONE), {}, "a tool or a call that is not a function"),
        ({"messages": [user("hi \ud83d")]}, choice(DONE), {}, "a text with an unpaired surrogate"),
    ],
)
def test_what_is_no_whole_conversation_is_counted(
    made: Made, tmp_path: Path, request_: dict[str, Any], response: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    live(made, request_, response, **more)
    with pytest.raises(DataError, match=f"1: {reason}"):
        run(made, tmp_path / "out.jsonl")


def test_an_answer_that_ended_is_whole_though_the_agent_left_before_the_streams_end(made: Made, tmp_path: Path) -> None:
    live(made, CHAT, choice(DONE), **{ABANDONED: True})
    [line], _ = run(made, tmp_path / "out.jsonl")
    assert line["messages"][-1] == DONE


def test_a_request_of_anthropics_is_told_whole(made: Made, tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "2"}
    messages = [user("1+1?"), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
    request = {"system": "Be brief.", "messages": messages, "tools": [tool], "max_tokens": 9}
    answer = {"type": "message", "content": [{"type": "text", "text": "2"}], "stop_reason": "end_turn"}
    live(made, request, answer)
    [line], _ = run(made, tmp_path / "out.jsonl")
    assert [m["role"] for m in line["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert line["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 1}}
    assert json.loads(line["tools"]) == [ADD]


@pytest.mark.parametrize(
    ("written", "exported"),
    [('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}), ('{"n": NaN}', {"n": None})],
)
def test_arguments_are_read_as_json_from_outside(made: Made, tmp_path: Path, written: str, exported: Any) -> None:
    called = calls_tool("a")
    called["tool_calls"][0]["function"]["arguments"] = written
    made.attempt({}, [Said([user("q")], called, tools=[ADD])], 1.0)
    [line], _ = run(made, tmp_path / "out.jsonl")
    assert line["messages"][-1]["tool_calls"][0]["function"]["arguments"] == exported


def test_spans_with_half_a_character_are_what_any_reader_takes(made: Made, tmp_path: Path) -> None:
    live(made, {"messages": [user("q \ud83d")]}, choice(DONE))
    [line], _ = run(made, tmp_path / "out.jsonl", format="openinference")
    json.dumps(line, ensure_ascii=False).encode()  # or it raises
    assert line["attributes"]["llm.input_messages.0.message.content"] == "q \ufffd"


def test_the_reward_of_spans_is_that_of_the_agents_named(made: Made, tmp_path: Path) -> None:
    calls = [Said([user("q")], says("y")), Said([user("r")], says("z"), agent="other")]
    made.attempt({}, calls, rewards=[(0.0, "writer", "run"), (1.0, "other", "run")])
    with pytest.raises(DataError, match="reward below"):
        run(made, tmp_path / "out.jsonl", format="openinference", agents=("writer",), min_reward=0.5)


def test_a_line_is_not_lost_to_an_equal_one_of_a_validation(made: Made, tmp_path: Path) -> None:
    made.attempt({"q": 1}, [Said([user("route")], says("a"))], 0.5)
    made.attempt({"q": 2}, [Said([user("route")], says("a"))], 1.0, mode="val", group="v")
    lines, _ = run(made, tmp_path / "out.jsonl")
    assert [line["reward"] for line in lines] == [0.5]


def test_an_attempt_that_begins_while_the_store_is_read_has_not_ended(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.attempt({"q": 1}, [Said([user("a")], says("b"))], 1.0)
    whole = room.each_trace

    def then_another(*given: Any, **options: Any) -> Any:
        made.attempt({"q": 2}, [Said([user("c")], says("d"))], 1.0, mode="val")
        return whole(*given, **options)

    monkeypatch.setattr(room, "each_trace", then_another)
    lines, done = run(made, tmp_path / "out.jsonl")
    assert [line["messages"][0]["content"] for line in lines] == ["a"]
    assert done.left_out == {"attempt has not ended": 1}
