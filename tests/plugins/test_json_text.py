"""JSON text of programs: whatever they may write and read, as it is."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai")

from hypothesis import given
from hypothesis import strategies as st

from lightning_openai.json_text import to_json
from lightning_spans.schema.json import read_json, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**18, 10**40)
    | st.floats(allow_nan=False, allow_infinity=False, width=32) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)  # fmt: skip


@given(VALUES)
def test_what_is_written_is_read_as_it_was(value):
    assert read_json(to_json(value)) == json.loads(to_json(value)) == value


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("beside", [1, 10**30])
def test_what_json_has_not_is_null(number, beside):
    assert to_json({"is": [number], "beside": beside}).replace(" ", "") == f'{{"is":[null],"beside":{beside}}}'


@pytest.mark.parametrize("value", [10**30, [2**64 - 1, 2**64, -(2**63) - 1]])
def test_what_orjson_refuses_is_written(value):
    assert read_json(to_json({"result": value, "by": object})) == {"result": value, "by": str(object)}


@pytest.mark.parametrize("text", [None, "", b"", "[1]", "{", "1" * 30, "{" * 5])
def test_what_is_no_object_is_none(text):
    assert read_object(text) is None
