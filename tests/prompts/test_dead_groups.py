"""Dead tasks are counted, instructions are chosen by what they solved, and requests get their own prompts back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.record.prompts import own_body, with_prompts
from lightning_spans.schema.attempts import Attempt
from lightning_trainer.kits.prompts.dead_groups.proposals import PaidProposals
from lightning_trainer.kits.prompts.dead_groups.tasks import DeadTasks, Instruction

WORDS = st.text("ab \n", max_size=6)


def prompted(body, before, after):
    attempt = Attempt("r", "t", "http://x", "k", prompts={"writer": {"before": before, "after": after}})
    return with_prompts(body, "writer", attempt)


@given(WORDS, st.text("abc", min_size=1, max_size=4), st.text("abc", min_size=1, max_size=4), WORDS)
def test_a_request_gets_its_own_prompt_back_or_none(start, before, after, end):
    own = {"model": "m", "messages": [{"role": "system", "content": start + before + end}, {"role": "user"}]}
    changed = prompted(own, before, after)
    assert own_body(changed, before, after) in (own, None)
    if after not in (start + end) and "c" in after and "c" not in before:
        assert own_body(changed, before, after) == own


@pytest.mark.parametrize(
    "body",
    [
        {"instructions": "Say. Be brief.", "input": "x"},
        {"system": [{"type": "text", "text": "Say. Be brief."}], "messages": []},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Say. Be brief."}]}]},
    ],
)
def test_each_kind_of_request_gets_its_own_prompt_back(body):
    changed = prompted(body, "Say.", "Think aloud.")
    assert changed is not None
    assert own_body(changed, "Say.", "Think aloud.") == body


def test_a_task_is_dead_while_all_its_rollouts_have_the_lowest_reward():
    known = DeadTasks()
    assert known.visit({"a": [0.0, 0.0], "b": [0.0, 1.0], "c": []}) == ["a"]
    assert known.visit({"a": [0.0, float("-inf")], "b": [0.0]}) == ["a", "b"]
    assert known.visits == {"a": 2, "b": 1}
    known.visit({"a": [0.5, 0.0]})
    assert known.visits == {"b": 1}
    assert known.visit({"d": [-1.0], "b": [0.0]}) == ["d"]  # now 0 is better than the lowest
    assert (known.visits, known.groups) == ({"d": 1}, 4)
    assert DeadTasks().visit({"a": [0.0], "b": [-2.0]}, least=-2.0) == ["b"]
    assert DeadTasks.from_json(json.loads(json.dumps(known.to_json()))) == known
    assert DeadTasks.from_json({}) == DeadTasks()


def test_an_instruction_is_tried_by_what_it_solved_and_given_up_after_three_tasks():
    idle = Instruction("writer", "idle", {"a": False, "b": False})
    good = Instruction("writer", "good", {"a": True, "b": False, "c": False})
    better = Instruction("checker", "better", {"b": True})
    known = DeadTasks(instructions=[idle, good, better])
    assert known.choose("a") is good  # it solved this one
    assert known.choose("d") is better
    better.tried["d"] = good.tried["d"] = False
    assert known.choose("d") is idle
    idle.tried["e"] = False
    known.instructions = [idle]
    assert known.choose("d") is None
    assert (DeadTasks(instructions=[good, better]).tried, known.solved) == ({"a", "b", "c", "d"}, set())


def test_a_proposal_is_paid_for_once_and_all_count(tmp_path: Path):
    paid = PaidProposals(tmp_path / "instructions.jsonl")
    paid.add("proposal", "one", {"text": "x", "tokens": 3})
    paid.add("proposal", "two", {"text": "y", "tokens": 4})
    again = PaidProposals(tmp_path / "instructions.jsonl")
    assert (again.count, again.tokens, again.next("proposal", "three")) == (2, 7, None)
    assert again.next("proposal", "one") == {"text": "x", "tokens": 3}
