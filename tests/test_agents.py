from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.agents import check_known, check_spelling, selects, unheard
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("wirter", "writer"), ("Writer", "writer"), ("write", "writer"), ("senior reseacher", "senior researcher")],
)
def test_misspelt_name_is_an_error_that_says_what_is_meant(name, meant):
    with pytest.raises(UnknownAgentError, match=rf"'{name}' was never seen, but '{meant}' was"):
        check_spelling([name, "checker"], [meant, "checker"])


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (["solver", "answerer"], ["solver"]),  # it may speak later
        (["writer"], ["rewriter"]),
        (["solver_2"], ["solver_1", "solver_3"]),
        (["writer", "writers"], ["writer"]),  # the one that is nearly it is selected, too
        (["write*"], ["vriter"]),
    ],
)
def test_agent_that_may_still_come_is_no_misspelling(chosen, seen):
    check_spelling(chosen, seen)


def test_unheard_are_the_names_and_globs_that_nothing_matched():
    assert unheard(["writer", "re*", "x?", "checker"], ["rewriter", "checker"]) == ["writer", "x?"]
