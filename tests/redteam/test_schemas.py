"""Attacks with what tools bring along: schemas that fetch, that never end, and rules that fail at them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from lightning_spans import hooks
from lightning_spans.adapter.adapt import adapt
from lightning_trainer.bounded import BoundedProcess
from lightning_trainer.rl.rewards import checking, installed, read_rules
from lightning_trainer.rl.rewards.judge import take_failures
from support.rl.attempts import Attempt, found

pytestmark = pytest.mark.timeout(120)


def offering(schema, arguments='{"x": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}') -> Attempt:
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    return Attempt().chat("w", ("add", arguments, "A"), tools=tools)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Checks with less processor time, so that those that are ended cost a tenth."""
    monkeypatch.setattr(checking, "_CHECKER", checker := BoundedProcess(Path(checking.__file__), "0.2"))
    yield
    checker.close()


def doubling(levels: int) -> dict[str, object]:
    two = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**two, f"l{levels}": {"type": "object"}}, "$ref": "#/$defs/l0"}


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels):
        schema = {"allOf": [schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"x": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(x+x+)+y$": {}}, "properties": {"x": {"$ref": "#/nowhere"}}},
        doubling(40),
        {"properties": {"x": {"type": "string", "pattern": "("}}},
        {"if": {"$ref": "#"}, "then": {"$ref": "#"}},
        {"$dynamicAnchor": "a", "$dynamicRef": "#a"},
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": "#"},
        {"$schema": "http://json-schema.org/draft-03/schema#", "type": "strange"},
        {"$schema": ["strange"]},
        {"$ref": "#/enum/0", "enum": [5]},
        {"$ref": "#/title/0", "title": "text"},
        nested(300),
    ],
    ids=[
        "itself", "pattern", "unresolved", "doubling", "no pattern", "branches", "dynamic", "recursive",
        "unknown type", "unknown draft", "into a number", "into a text", "nested",
    ],
)  # fmt: skip
def test_a_schema_that_never_ends_or_is_none_is_fitted_by_nothing(schema):
    assert found(offering(schema), "tool_arguments") == {("w", 1): -1.0}


def test_what_cannot_be_written_or_makes_the_library_panic_fits_nothing():
    checks = checking.Checks()
    assert not checks.fits({"x": 1}, nested(100_000))
    assert not checks.fits({"x": "a"}, {"maximum": 10**5_000})
    assert not checks.fits(["a"] * 2_000, {"if": {"$ref": "#"}, "then": {"$ref": "#"}})
    assert checks.fits({"x": 1}, {"required": ["x"]})


def test_a_schema_fetches_nothing():
    with socket.create_server(("127.0.0.1", 0)) as heard:
        heard.setblocking(False)
        address = f"http://127.0.0.1:{heard.getsockname()[1]}/schema.json"
        for schema in ({"properties": {"x": {"$ref": address}}}, {"$schema": address}, {"$id": address, "$ref": "x"}):
            found(offering(schema), "tool_arguments")
        with pytest.raises(BlockingIOError):
            heard.accept()


def test_an_attempt_has_three_checks_that_take_too_long_and_no_more(monkeypatch):
    attempt, asked = Attempt(), []
    for number in range(20):
        schema = {"properties": {"x": {"pattern": f"^(a+)+{number}$"}}}
        tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
        attempt.chat("w", ("add", json.dumps({"x": "a" * 50}), str(number)), tools=tools)
    monkeypatch.setattr(BoundedProcess, "ask", lambda _, question: asked.append(question) or _too_long())
    assert found(attempt, "tool_arguments") == {("w", number): -1 / 20 for number in range(1, 21)}
    assert len(asked) == 3


def _too_long():
    raise checking.TooLongError


def test_the_text_of_a_model_does_not_hold_up_the_search_for_a_format():
    assert not checking.Checks().found("^(a+)+$", "a" * 60 + "!")


def broken(trace):
    raise RecursionError("at what this attempt said")


def test_a_rule_that_fails_takes_no_penalty_away_and_is_counted(monkeypatch):
    attempt = offering({"type": "object"}).tool("w", "A", status="error")
    with installed(read_rules({"tool_status": 1.0, "test_schemas:broken": 1.0, "repeated_calls": 1.0})):
        (rewards,) = hooks.notify("lightning_rewards", trace=attempt.trace, transitions=adapt(attempt.trace))
        assert {reward.source: reward.value for reward in rewards} == {"tool_status": -1.0, "repeated_calls": 0.0}
        assert take_failures() == {"rule_failures/test_schemas:broken": 1.0}
        assert take_failures() == {}
