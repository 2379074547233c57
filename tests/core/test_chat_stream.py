"""Streams in the core: events cut out of bytes in any pieces, and deltas put together to what they amount to."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.chat.stream import EventReader, Growing, message_of

DATA = st.text(alphabet='ab {}:"é', min_size=1, max_size=8).filter(lambda text: text.strip() and text != "[DONE]")


def written(data, kind):
    """An event as one server or another writes it, and what is read of it."""
    first, rest = data[: len(data) // 2], data[len(data) // 2 :]
    return {
        "plain": f"data: {data}\n\n",
        "named": f"event: x\nid: 1\ndata: {data}\n\n",
        "crlf": f": ping\r\ndata:{data}\r\n\r\n",
        "lines": f"data: {first}\ndata: {rest}\n\n",
    }[kind].encode(), (f"{first}\n{rest}" if kind == "lines" else data.removeprefix(" ") if kind == "crlf" else data)


@given(
    events=st.lists(st.tuples(DATA, st.sampled_from(["plain", "plain", "named", "crlf", "lines"])), max_size=5),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    done=st.booleans(),
)
def test_events_are_the_same_in_whatever_pieces_they_come(events, sizes, done):
    pairs = [written(data, kind) for data, kind in events]
    sent = b"".join(bytes_ for bytes_, _ in pairs) + (b"data: [DONE]\n\ndata: late\n\n" if done else b"")
    reader, found, at, turn = EventReader(), [], 0, 0
    while at < len(sent):
        found += reader.feed(sent[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    assert found == [data.encode() for _, data in pairs]
    assert reader.done is done
    assert EventReader().feed(sent) == found


def test_an_event_without_an_end_is_not_kept_for_ever():
    reader = EventReader(most_bytes=1000)
    assert [reader.feed(b"data: " + b"x" * 100) for _ in range(9)] == [[]] * 9
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        reader.feed(b"x" * 100)


def grown(*deltas):
    growing = Growing()
    for delta in deltas:
        growing.add(delta)
    return message_of(growing)


def called(name, arguments, **more):
    return {"function": {"name": name, "arguments": arguments}, **more}


def test_tool_calls_grow_in_their_places():
    message = grown(
        {"role": "assistant", "tool_calls": [called("add", "", index=0, id="a"), called("sub", "{", index=1, id="b")]},
        {"tool_calls": [called(None, '{"x"', index=0, id=""), called("", "}", index=1)]},
        {"tool_calls": [called(None, ": 1}", index=0)]},
    )
    assert message["tool_calls"] == [called("add", '{"x": 1}', id="a"), called("sub", "{}", id="b")]
    assert message["content"] is None


def test_tool_calls_that_a_server_sends_without_an_index_stay_apart():
    first, second = called("add", '{"x": 1}', id="a"), called("sub", "{}", id="b")
    assert grown({"tool_calls": [first]}, {"tool_calls": [second]})["tool_calls"] == [first, second]


def test_a_new_id_with_a_name_begins_a_call_though_the_index_is_that_of_another():
    first, second = called("add", '{"x": 1}', id="a"), called("sub", "", id="b")
    message = grown(
        {"tool_calls": [{**first, "index": 0}]},
        {"tool_calls": [{**second, "index": 0}]},
        {"tool_calls": [called(None, "{", index=0)]},
        {"tool_calls": [called(None, "}", index=0, id="new with each delta")]},
    )
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"x": 1}'},
        {"name": "sub", "arguments": "{}"},
    ]


def test_the_input_of_a_custom_tool_grows():
    whole = grown(
        {"tool_calls": [{"index": 0, "id": "a", "type": "custom", "custom": {"name": "sql", "input": "select"}}]},
        {"tool_calls": [{"index": 0, "custom": {"input": " 1"}}]},
    )
    assert whole["tool_calls"] == [{"id": "a", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}]


def test_many_calls_cost_no_more_each_than_few():
    growing = Growing()
    began = time.process_time()
    growing.add({"tool_calls": [called("f", "{}", index=index) for index in range(50_000)]})
    growing.add({"tool_calls": [called("", " ", index=index) for index in range(50_000)]})
    assert time.process_time() - began < 20  # a search through all for each would take minutes
    assert len(growing.whole()["tool_calls"]) == 50_000
