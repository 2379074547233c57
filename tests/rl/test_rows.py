"""Rows: what is merged, what is dropped, and that nothing vanishes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import Row, token_weights
from support.rl.calls import call, rows_of


def actions(row: Row):
    """What a row trains, call by call: the context each response is predicted from, and the response."""
    positions = np.flatnonzero(row.mask).tolist()
    for length in row.lengths:
        places, positions = positions[:length], positions[length:]
        assert places == list(range(places[0], places[0] + length))
        yield (
            row.attempt_id,
            row.agent,
            row.policy_version,
            row.temperature,
            tuple(row.tokens[: places[0]].tolist()),
            tuple(row.tokens[places].tolist()),
            tuple(row.logprobs[places].tolist()),
            tuple(row.advantages[places].tolist()),
        )


def all_actions(rows):
    return sorted(action for row in rows for action in actions(row))


def summary(rows):
    return [(row.tokens.tolist(), row.mask.tolist(), row.advantages.tolist(), row.lengths, row.agent) for row in rows]


def test_a_call_becomes_prompt_and_response_with_only_the_response_trained():
    [row], account = rows_of([call(0, [1, 2, 3], [4, 5])], [0.25])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5]
    assert row.mask.tolist() == [False, False, False, True, True]
    assert row.logprobs == pytest.approx([0, 0, 0, -0.5, -0.6])
    assert row.advantages.tolist() == [0, 0, 0, 0.25, 0.25]
    assert (row.tokens.dtype, row.mask.dtype, row.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert row.advantages.dtype == np.float64
    assert (row.agent, row.attempt_id, row.rollout_id, row.group_id) == ("writer", "a0", "r-a0", "group of r-a0")
    assert (row.policy_version, row.temperature, row.transitions) == (3, 1.0, 1)
    assert (account.seen, account.trained, account.rows, account.tokens) == (1, 1, 1, 2)


def test_a_call_that_continues_another_shares_its_row_with_each_token_in_its_place():
    first, second = call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9, 9], [5])
    [row], account = rows_of([first, second], [0.5, -1.0])
    assert row.tokens.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert row.mask.tolist() == [False, False, True, True, False, False, True]
    assert row.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -1.0]
    assert row.lengths == (2, 1)
    assert account.merged == 1
    assert (account.tokens_in_rows, account.tokens_in_calls) == (7, 4 + 7)


def test_a_prompt_that_adds_nothing_still_merges():
    [row], _ = rows_of([call(0, [1], [2, 3]), call(1, [1, 2, 3], [4])])
    assert row.tokens.tolist() == [1, 2, 3, 4]
    assert row.lengths == (2, 1)


def test_a_prompt_that_differs_in_one_token_makes_its_own_row():
    rows, account = rows_of([call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 5, 9], [6])])
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 5, 9, 6]]
    assert account.merged == 0


def test_interleaved_agents_merge_each_with_their_own_branch():
    history = {"a": [1, 1], "b": [1, 2], "c": [1, 3]}
    calls = []
    for turn in range(30):
        agent = "abc"[turn % 3]
        response = [100 + turn, 200 + turn]
        calls.append(call(turn, history[agent], response, agent=agent))
        history[agent] = [*history[agent], *response, 300 + turn]
    rows, account = rows_of(calls)
    assert [row.agent for row in rows] == ["a", "b", "c"]
    assert [row.transitions for row in rows] == [10, 10, 10]
    assert account.tokens_in_calls / account.tokens_in_rows > 5  # merging only onto the previous call: 1.0


def test_parallel_branches_of_one_agent_merge_each_with_their_own():
    calls = [
        call(0, [1, 5], [10]),
        call(1, [1, 6], [20]),
        call(2, [1, 5, 10, 7], [11]),
        call(3, [1, 6, 20, 7], [21]),
    ]
    rows, _ = rows_of(calls)
    assert [row.tokens.tolist() for row in rows] == [[1, 5, 10, 7, 11], [1, 6, 20, 7, 21]]


def test_the_longest_branch_is_continued():
    calls = [call(0, [1], [2]), call(1, [9], [9]), call(2, [1], [2, 3]), call(3, [1, 2, 3, 4], [5])]
    rows, _ = rows_of(calls)
    assert [row.tokens.tolist() for row in rows] == [[1, 2], [9, 9], [1, 2, 3, 4, 5]]


def test_a_second_continuation_of_a_row_makes_its_own_row():
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3], [5])]
    rows, account = rows_of(calls)
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert account.merged == 1
    assert account.tokens == 3


def test_equal_prompts_and_equal_answers_are_all_kept():
    votes = [call(turn, [1, 2], [7]) for turn in range(4)]
    rows, account = rows_of(votes)
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 7]] * 4
    assert account.trained == 4


def test_every_choice_of_a_call_is_kept_and_the_next_call_continues_the_one_it_used():
    calls = [call(0, [1], [2], choice=0), call(0, [1], [3], choice=1), call(1, [1, 3, 9], [4])]
    rows, _ = rows_of(calls)
    assert [row.tokens.tolist() for row in rows] == [[1, 2], [1, 3, 9, 4]]


@pytest.mark.parametrize(
    "other",
    [{"attempt": "a1"}, {"agent": "reader"}, {"policy": "q"}, {"policy_version": 4}, {"temperature": 0.5}],
    ids=lambda other: next(iter(other)),
)
def test_what_differs_in_kind_never_shares_a_row_and_is_not_lost(other):
    rows, account = rows_of([call(0, [1], [2]), call(1, [1, 2, 3], [4], **other)])
    assert len(rows) == 2
    assert account.trained == 2


def test_merging_can_be_switched_off():
    rows, account = rows_of([call(0, [1], [2]), call(1, [1, 2, 3], [4])], merge=False)
    assert [row.transitions for row in rows] == [1, 1]
    assert account.merged == 0


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"error": "429"}, UntrainedReason.CALL_FAILED),
        ({"tokens": None}, UntrainedReason.NO_TOKENS),
        ({"tokens": Tokens((), (1,), (-1.0,))}, UntrainedReason.NO_PROMPT),
        ({"tokens": Tokens((1,), (), ())}, UntrainedReason.NO_RESPONSE),
        ({"tokens": Tokens((1,), (2, 3), (-1.0,))}, UntrainedReason.BAD_LOGPROBS),
        ({"tokens": Tokens((1,), (2,), (math.nan,))}, UntrainedReason.BAD_LOGPROBS),
        ({"tokens": Tokens((1,), (2,), (-math.inf,))}, UntrainedReason.BAD_LOGPROBS),
        ({"sampling": {"temperature": 0.0}}, UntrainedReason.GREEDY),
        ({"sampling": {"temperature": 0.7, "logprobs_temperature": 1.0}}, UntrainedReason.OTHER_TEMPERATURE),
        ({"tokens": Tokens((1,) * 9, (2,), (-1.0,))}, UntrainedReason.TOO_LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_call_that_cannot_be_trained_is_counted_and_takes_no_other_along(broken, reason):
    from dataclasses import replace

    calls = [call(0, [1], [2]), replace(call(1, [1], [2]), **broken), call(2, [1], [3])]
    rows, account = rows_of(calls, [1.0, math.nan, 2.0], max_length=8)
    assert [row.tokens.tolist() for row in rows] == [[1, 2], [1, 3]]
    assert account.dropped == {reason: 1}
    assert account.seen == 3


def test_log_probabilities_of_the_sampling_temperature_are_trained_whatever_it_is():
    from dataclasses import replace

    calls = [replace(call(0, [1], [2]), sampling={"temperature": at, "logprobs_temperature": at}) for at in (0.7, 1)]
    assert rows_of(calls)[1].dropped == {}


def test_a_missing_temperature_is_the_interface_default():
    [row], _ = rows_of([call(0, [1], [2], temperature=None)])
    assert row.temperature == 1.0


def test_rows_without_advantage_are_kept_and_counted():
    rows, account = rows_of([call(0, [1], [2]), call(1, [3], [4])], [0.0, 1.0])
    assert [row.has_gradient for row in rows] == [False, True]
    assert account.rows_without_gradient == 1
    assert account.tokens == 2


def test_an_advantage_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="advantage of a call of attempt a0 is nan"):
        rows_of([call(0, [1], [2])], [math.nan])


def test_as_many_advantages_as_transitions_are_needed():
    with pytest.raises(ValueError, match="1 transitions, but 2 advantages"):
        rows_of([call(0, [1], [2])], [1.0, 2.0])


def test_a_row_whose_parts_disagree_cannot_be_made():
    [row], _ = rows_of([call(0, [1], [2])])
    from dataclasses import replace

    with pytest.raises(ValueError, match="differ in shape"):
        replace(row, mask=row.mask[:1])
    with pytest.raises(ValueError, match="add up"):
        replace(row, lengths=(2,))


def test_equal_hashes_of_different_tokens_never_merge(monkeypatch):
    monkeypatch.setattr(
        "lightning_trainer.rl.prefixes._powers", lambda size: np.ones(size, np.uint64)
    )  # a sum, no more
    rows, _ = rows_of([call(0, [1, 2], [3]), call(1, [3, 2, 1, 9], [4]), call(2, [1, 2, 3, 9], [5])])
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 9, 5], [3, 2, 1, 9, 4]]


def test_a_thousand_turns_merge_into_one_row_in_time_that_grows_with_the_tokens_read():
    # 1,000 turns of one conversation and 1,000 unrelated calls of 100 tokens: a few seconds if anything were quadratic.
    conversation, calls, random_numbers = [7], [], random.Random(0)
    for turn in range(1_000):
        calls.append(call(2 * turn, conversation, [turn]))
        conversation = [*conversation, turn, 5]
        calls.append(call(2 * turn + 1, [random_numbers.randrange(50_000) for _ in range(100)], [1]))
    rows, account = rows_of(calls)
    assert len(rows) == 1_001
    assert account.merged == 999


@st.composite
def conversations(draw):
    """Calls of a few attempts and agents whose prompts start anew, continue an earlier call, or repeat one."""
    token = st.integers(0, 2)
    calls: list[Transition] = []
    for turn in range(draw(st.integers(1, 12))):
        attempt, agent = draw(st.sampled_from("ab")), draw(st.sampled_from("xy"))
        prompt = draw(st.lists(token, min_size=1, max_size=3))
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = [*earlier.tokens.prompt, *earlier.tokens.response, *prompt[1:]]
        for choice in range(draw(st.integers(1, 2))):
            response = draw(st.lists(token, min_size=1, max_size=3))
            calls.append(
                call(turn, prompt, response, agent=agent, attempt=attempt, choice=choice, policy_version=turn // 6)
            )
    return calls


@given(conversations(), st.randoms())
def test_rows_do_not_depend_on_the_order_of_transitions(calls, random_numbers):
    advantages = np.arange(1.0, len(calls) + 1)
    order = list(range(len(calls)))
    random_numbers.shuffle(order)
    rows, account = rows_of(calls, advantages)
    shuffled, same_account = rows_of([calls[i] for i in order], advantages[order])
    assert summary(shuffled) == summary(rows)
    assert same_account == account


@given(conversations())
def test_merged_rows_train_exactly_what_unmerged_ones_do(calls):
    merged, account = rows_of(calls)
    unmerged, _ = rows_of(calls, merge=False)
    assert all_actions(merged) == all_actions(unmerged)
    assert len(unmerged) == len(calls)
    assert account.tokens == sum(len(c.tokens.response) for c in calls)
    assert account.tokens_in_rows <= account.tokens_in_calls == sum(len(row.tokens) for row in unmerged)


@given(conversations(), st.sampled_from(["token-mean", "sequence-mean", "sequence-sum"]))
def test_merging_changes_no_weight_in_the_loss(calls, aggregation):
    def weighted(rows):
        weights = token_weights(rows, aggregation)
        found = []
        for row, row_weights in zip(rows, weights, strict=True):
            assert len(row_weights) == row.mask.sum()
            starts = np.cumsum((0, *row.lengths))[:-1]
            found += [(a, float(row_weights[s])) for a, s in zip(actions(row), starts, strict=True)]
        return sorted(found)

    merged, unmerged = weighted(rows_of(calls)[0]), weighted(rows_of(calls, merge=False)[0])
    assert [action for action, _ in merged] == [action for action, _ in unmerged]
    assert [weight for _, weight in merged] == pytest.approx([weight for _, weight in unmerged])


@given(conversations(), st.integers(1, 12), st.booleans())
def test_nothing_vanishes(calls, max_length, merge):
    rows, account = rows_of(calls, max_length=max_length, merge=merge)
    assert account.seen == len(calls) == account.trained + sum(account.dropped.values())
    assert account.trained == sum(row.transitions for row in rows)
    assert all(len(row.tokens) <= max_length for row in rows)


def test_token_mean_weighs_every_token_alike_and_sequence_mean_every_response():
    rows, _ = rows_of([call(0, [1], [2, 3, 4]), call(1, [1, 2, 3, 4, 5], [6])])
    assert token_weights(rows, "token-mean")[0] == pytest.approx([1 / 4] * 4)
    assert token_weights(rows, "sequence-mean")[0] == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert token_weights(rows, "sequence-sum")[0] == pytest.approx([1 / 2] * 4)


def test_an_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="Use token-mean"):
        token_weights([], "mean")
