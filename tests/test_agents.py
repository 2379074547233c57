from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.agents import check_known, selects
from lightning_spans.errors import UnknownAgentError


def test_a_name_selects_only_itself():
    assert selects(["writer"], "writer")
    assert not selects(["writer"], "rewriter")
    assert not selects(["writer"], "writer2")
    assert not selects(["writer"], "Writer")


def test_an_unknown_agent_is_never_selected():
    assert not selects(["*"], None)
    assert not selects([], None)


def test_a_glob_is_explicit():
    assert selects(["*writer"], "rewriter")
    assert not selects(["write?"], "rewriter")


@given(st.text(min_size=1))
def test_every_name_selects_itself_even_with_glob_characters(name):
    assert selects([name], name)


def test_a_name_that_was_never_seen_is_an_error_that_lists_the_seen():
    with pytest.raises(UnknownAgentError, match=r"'wirter' was never seen. Agents seen: rewriter, writer"):
        check_known(["wirter"], ["writer", "rewriter"])
    with pytest.raises(UnknownAgentError, match="attach"):
        check_known(["writer"], [])
    check_known(["re*"], ["rewriter"])
