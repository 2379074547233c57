"""The account: it adds up, or it can't be made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.schema.rewards import Reward
from lightning_trainer.reasons.continuation import ContinuationReason
from lightning_trainer.rl.account import Account, UntrainedReason, count_continuations


@st.composite
def accounts(draw):
    rows = draw(st.integers(0, 9))
    trained = draw(st.integers(rows, 20))
    dropped = draw(
        st.dictionaries(
            st.sampled_from([UntrainedReason.NOT_SELECTED, UntrainedReason.ATTEMPT_FAILED, UntrainedReason.GREEDY]),
            st.integers(0, 9),
        )
    )
    return Account(
        seen=trained + sum(dropped.values()),
        dropped=dropped,
        trained=trained,
        rows=rows,
        rows_without_gradient=draw(st.integers(0, rows)),
        tokens=draw(st.integers(0, 99)),
        tokens_in_rows=100,
        tokens_in_calls=200,
        unclaimed=draw(st.dictionaries(st.sampled_from(["writter", "editor"]), st.integers(1, 9))),
        continued=draw(st.integers(0, 9)),
        joined=draw(st.integers(0, 9)),
        unjoined=draw(st.dictionaries(st.sampled_from(["lost", "tried again"]), st.integers(0, 9))),
        not_continued=draw(
            st.dictionaries(
                st.sampled_from([ContinuationReason.REWRITTEN, ContinuationReason.EDITED]), st.integers(0, 9)
            )
        ),
    )


def test_an_account_that_does_not_add_up_cannot_be_made():
    with pytest.raises(ValueError, match="3 seen, 1 trained"):
        Account(seen=3, trained=1, dropped={UntrainedReason.NOT_SELECTED: 1})
    with pytest.raises(ValueError, match="2 rows of 1 calls"):
        Account(seen=1, trained=1, rows=2)
    with pytest.raises(ValueError, match="1 rows of 1 calls"):
        Account(seen=1, trained=1, rows=1, rows_without_gradient=2)


@given(accounts(), accounts())
def test_accounts_add_up_to_an_account(left, right):
    total = left + right
    assert total == right + left
    assert total.seen == left.seen + right.seen
    assert total.merged == left.merged + right.merged
    assert sum(total.dropped.values()) == sum(left.dropped.values()) + sum(right.dropped.values())


@given(accounts())
def test_the_empty_account_adds_nothing(account):
    assert account + Account() == account


def test_calls_left_out_early_are_seen_and_dropped():
    account = (
        Account(seen=2, trained=2, rows=1)
        .plus_dropped(UntrainedReason.NOT_SELECTED, 3)
        .plus_dropped(UntrainedReason.NOT_SELECTED, 1)
    )
    assert account.seen == 6
    assert account.dropped == {UntrainedReason.NOT_SELECTED: 4}
    assert account.plus_dropped(UntrainedReason.ATTEMPT_FAILED, 0) == account


def test_rewards_that_reached_no_call_are_counted_by_agent():
    def reward(agent):
        return Reward(rollout_id="r", attempt_id="a", value=1.0, agent=agent)

    account = Account().plus_unclaimed([reward("writter"), reward("writter")]).plus_unclaimed([reward("editor")])
    assert account.unclaimed == {"writter": 2, "editor": 1}
    assert "2 rewards for writter, which made no call in those attempts" in account.lines()
    assert account.metrics()["rewards_unclaimed"] == 3.0


def test_of_many_rewards_that_reached_no_call_the_first_are_told_and_the_rest_counted():
    lines = Account(unclaimed={f"agent{n:04}": 4 for n in range(3000)}).lines()
    assert len(lines) < 20
    assert lines[-2].startswith("4 rewards for agent0009, ")
    assert lines[-1].startswith("11960 rewards for 2,990 more, ")


def test_lines_tell_people_everything():
    account = Account(
        seen=9,
        dropped={UntrainedReason.NOT_SELECTED: 3, UntrainedReason.GREEDY: 1},
        trained=5,
        rows=2,
        rows_without_gradient=1,
        tokens=40,
        tokens_in_rows=100,
        tokens_in_calls=250,
    )
    assert account.lines() == [
        "9 calls seen, 5 trained on",
        "3 left out: agent not selected",
        "1 left out: temperature 0: not a sample of the policy",
        "2 rows, 3 calls merged onto an earlier one's (2.5x fewer tokens)",
        "40 trained tokens of 100",
        "1 row teaches nothing: all rewards of their group are equal",
    ]


def test_metrics_have_names_without_spaces():
    metrics = Account(seen=2, dropped={UntrainedReason.NOT_SELECTED: 1, UntrainedReason.GREEDY: 1}).metrics()
    assert metrics["calls_seen"] == 2.0
    assert metrics["calls_dropped/agent_not_selected"] == 1.0
    assert metrics["calls_dropped/temperature_0"] == 1.0
    assert not any(" " in name for name in metrics)


def test_the_share_of_joined_calls_leaves_out_those_that_begin_a_conversation():
    account = count_continuations(
        [
            ContinuationReason.BEGINS,
            ContinuationReason.JOINED,
            ContinuationReason.JOINED,
            ContinuationReason.JOINED,
            None,
            ContinuationReason.EDITED,
        ]
    )
    assert account.begun == 1
    assert (account.continued, account.not_continued, account.continued_share) == (
        3,
        {ContinuationReason.EDITED: 1},
        0.75,
    )
    assert "3 of 4 calls that continue an earlier one contain its tokens" in account.lines()
    assert f"1 do not: {ContinuationReason.EDITED}" in account.lines()
    metrics = account.metrics()
    assert (metrics["calls_continued"], metrics["continued_share"], metrics["calls_not_continued/history_edited"]) == (
        3,
        0.75,
        1,
    )
    assert count_continuations([ContinuationReason.BEGINS, None]).continued_share is None
    assert "continued_share" not in count_continuations([ContinuationReason.BEGINS]).metrics()


def test_halves_of_calls_that_stand_alone_are_told_with_their_reason():
    account = Account(joined=3, unjoined={"no span: lost": 2}) + Account(joined=1)
    assert "4 calls have both an agent's span and a gateway's record" in account.lines()
    assert "2 have not: no span: lost" in account.lines()
    metrics = account.metrics()
    assert (metrics["calls_joined"], metrics["calls_unjoined"], metrics["calls_unjoined/no_span"]) == (4, 2, 2)
