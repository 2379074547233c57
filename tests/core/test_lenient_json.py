"""The reader of JSON that others wrote: docs/reference/json.md says the same."""

from __future__ import annotations

import math

import pytest

from lightning_spans.schema.json import dumps, read_json, read_object


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1180591620717411303424}', {"a": 2**70}),
        ("[-9223372036854775809]", [-(2**63) - 1]),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('\ufeff{"a": "é"}', {"a": "é"}),
        ('{"a\\ud83d": "\\ud83d\\ude00 \\ude00"}', {"a\ufffd": "\U0001f600 \ufffd"}),
        ("[0.1234567890123456789012]", [0.1234567890123456789012]),
        ("[1e400, -1e400]", [math.inf, -math.inf]),
        ("[Infinity, -Infinity]", [math.inf, -math.inf]),
        (f"[{'9' * 5000}]", [math.inf]),
    ],
)
def test_what_others_write_is_read(text, value):
    assert read_json(text) == read_json(text.encode()) == value


def test_numbers_that_json_has_not_are_written_as_null():
    assert dumps(read_json("[NaN, 1e400, -Infinity, 1]")) == b"[null,null,null,1]"


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b'"\xff"', b"[" * 100_000])
def test_what_is_no_json_is_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        read_json(text)
    assert read_object(text) is None
