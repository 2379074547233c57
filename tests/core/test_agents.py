from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import UnknownAgentError
from lightning_spans.schema.agents import (
    check_known,
    check_spelling,
    earns,
    escape_name,
    label,
    name_of,
    parts_of,
    selects,
    unheard,
)


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


@pytest.mark.parametrize(
    ("pattern", "path", "meant"),
    [
        ("extract", "app/billing/extract", True),
        ("billing", "billing/extract", False),
        ("*", "billing/extract", True),
        ("billing/extract", "billing/extract", True),
        ("billing/extract", "app/billing/extract", True),
        ("billing/extract", "rebilling/extract", False),
        ("billing/extract", "billing/other/extract", False),
        ("billing/*", "billing/extract", True),
        ("billing/*", "billing/a/extract", False),
        ("billing/**", "billing/a/extract", True),
        ("billing/**", "app/billing", True),
        ("billing/**", "profile/extract", False),
        ("**/extract", "extract", True),
        ("b*/extract", "billing/extract", True),
        ("QA/Tester", "crew/QA//Tester", True),
        ("Tester", "QA//Tester", False),
        ("QA*", "QA//Tester", True),
        ("crew/QA//*", "crew/QA//Tester", True),
    ],
)
def test_a_name_is_the_end_of_a_path(pattern, path, meant):
    assert selects([pattern], path) is meant
    assert earns(pattern, path) is meant


@given(st.lists(st.text(alphabet="ab/*", min_size=1).filter(lambda name: name.strip("/") == name), min_size=1))
def test_a_path_is_read_as_it_was_written(names):
    path = "/".join(map(escape_name, names))
    assert parts_of(path) == tuple(names)
    assert name_of(path) == names[-1]
    assert selects([path], path)


def test_an_agent_is_called_by_its_path_where_it_is_selected_by_it():
    assert label("billing/extract", None) == label("billing/extract", ["extract", "*"]) == "extract"
    assert label("billing/extract", ["billing/**"]) == "billing/extract"
    assert label("profile/extract", ["billing/**"]) == "extract"
    assert label("QA//Tester", ["QA/Tester"]) == "QA/Tester"


def test_namesakes_are_listed_by_their_paths():
    with pytest.raises(UnknownAgentError, match=r"Agents seen: billing/extract, profile/extract, writer$"):
        check_known(["extact"], ["billing/extract", "profile/extract", "boss/writer"])
    check_known(["billing/extract"], ["billing/extract"])
