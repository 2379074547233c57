"""What an upstream's chunks become: most hold one token, and are taken on a shorter way."""

from __future__ import annotations

import copy

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.request.pending import begin
from lightning_trainer.gateway.upstream.assembly import Assembly

NUMBERS = st.one_of(st.integers(-1, 3), st.just(2**31), st.just(True), st.none(), st.floats(-3, 0), st.just("1"))
TEXTS = st.one_of(st.text("ab ", max_size=3), st.none(), st.just(7))
SHOWN = st.lists(st.fixed_dictionaries({}, optional={"logprob": NUMBERS, "token": TEXTS}), max_size=2)
DELTAS = st.one_of(
    st.fixed_dictionaries({"content": TEXTS}),
    st.fixed_dictionaries({}, optional={"role": st.just("assistant"), "content": TEXTS, "reasoning": TEXTS}),
    st.none(),
)
CHOICES = st.fixed_dictionaries(
    {"index": st.sampled_from([0, 0, 0, 1, True, 5, None, 0.0])},
    optional={
        "delta": DELTAS,
        "text": TEXTS,
        "logprobs": st.one_of(st.none(), st.fixed_dictionaries({}, optional={"content": SHOWN})),
        "token_ids": st.one_of(st.none(), st.lists(NUMBERS, max_size=2)),
        "prompt_token_ids": st.lists(st.integers(0, 3), max_size=2),
        "finish_reason": st.sampled_from([None, None, "stop", 3]),
    },
)
CHUNKS = st.fixed_dictionaries(
    {}, optional={"id": st.just("c"), "choices": st.lists(CHOICES, max_size=2), "prompt_token_ids": st.lists(NUMBERS)}
)
BEGIN = {"index": 0, "delta": {"content": "x"}, "token_ids": [1], "logprobs": {"content": [{"logprob": -0.5}]}}
ODD = st.sampled_from([  # what may be otherwise in a chunk of one token
    {"index": 1}, {"index": True}, {"index": 0.0}, {"token_ids": [2**31]}, {"token_ids": [-1]}, {"token_ids": [True]},
    {"token_ids": [1, 2]}, {"token_ids": []}, {"token_ids": None}, {"logprobs": None}, {"prompt_token_ids": [4]},
    {"finish_reason": "stop"}, {"finish_reason": 3}, {"delta": {"content": "y", "reasoning": "z"}}, {"delta": None},
    {"delta": {"content": None}}, {"delta": {"content": 7}}, {"logprobs": {"content": [{"logprob": "1"}]}},
    {"logprobs": {"content": [{"logprob": -1}]}}, {"logprobs": {"content": []}}, {"text": "t"}, {"new": 1}, {},
])  # fmt: skip
NEARLY = st.builds(lambda odd: {"choices": [{**BEGIN, **odd}]}, ODD)
REQUESTS = st.fixed_dictionaries(
    {}, optional={"logprobs": st.booleans(), "return_token_ids": st.booleans(), "n": st.just(2)}
)


class Longer(Assembly):
    """Takes every chunk on the longer way."""

    def _add_token(self, reply):
        return False


def went(kind, request, chunks):
    """Return what goes to the agent, chunk by chunk, and what is recorded."""
    draft = begin(request, Grant("attempt", None, None, "r", "a"), {}, "m")
    assembly, sent = kind(draft), []
    for chunk in chunks:
        try:
            sent.append(orjson.dumps(assembly.add(copy.deepcopy(chunk))))
        except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
            sent.append(type(error))
            break
    assembly.settle({})
    return sent, draft.sampled.choices, draft.sampled.prompt_token_ids


@settings(max_examples=500, deadline=None)
@given(request=REQUESTS, chunks=st.lists(st.one_of(CHUNKS, NEARLY, NEARLY), max_size=6))
def test_both_ways_send_and_record_the_same(request, chunks):
    chunks = [{"id": "c", "choices": [BEGIN]}, *chunks]
    assert went(Assembly, request, chunks) == went(Longer, request, chunks)


def test_a_token_is_taken_on_the_shorter_way():
    chunks = [{"choices": [{**BEGIN, "finish_reason": None}]} for _ in range(3)]
    long = []

    class Counting(Assembly):
        def _add_choice(self, choice):
            long.append(choice)
            super()._add_choice(choice)

    _, (choice,), _ = went(Counting, {}, chunks)
    assert (choice.token_ids, choice.logprobs, choice.message) == ([1, 1, 1], [-0.5] * 3, {"content": "xxx"})
    assert len(long) == 1, "the first one makes room for those that follow"


def test_tool_calls_that_an_upstream_streams_without_an_index_are_on_record_each_by_itself():
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": f"f{at}", "arguments": "{}"}} for at in (0, 1)]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]
    _, (choice,), _ = went(Assembly, {}, chunks)
    assert choice.message["tool_calls"] == calls
