"""JSON text of programs: whatever they may write and read, as it is."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai")

from hypothesis import given
from hypothesis import strategies as st

from lightning_openai.json_text import read_json, read_object, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**18, 10**40) | st.floats(allow_nan=False, width=32)
    | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)  # fmt: skip


@given(VALUES)
def test_what_is_written_is_read_as_it_was(value):
    value = None if value in (float("inf"), float("-inf")) else value
    assert read_json(to_json(value)) == json.loads(to_json(value)) == value


@pytest.mark.parametrize("value", [10**30, "\udcff", [2**64 - 1, 2**64, -(2**63) - 1]])
def test_what_orjson_refuses_is_written(value):
    assert read_json(to_json({"result": value, "by": object})) == {"result": value, "by": str(object)}


@pytest.mark.parametrize("text", [None, "", b"", "[1]", "{", "1" * 30, "{" * 5])
def test_what_is_no_object_is_none(text):
    assert read_object(text) is None
