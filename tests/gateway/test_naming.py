"""Agents of programs that send no name: told by rules over their requests."""

from __future__ import annotations

import httpx
import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.naming import parse_rules
from lightning_trainer.policies import parse
from lightning_trainer.session.sampling import default_agent_name
from support.fakes import FakeEngine, served

RULES = [
    "title=system:(?i)title generator",
    "explore=system:file search specialist",
    'header:x-turn:"agent_name":"/?([^"]+)"',
    "header:x-subagent",
    "small=model:(haiku|nano|mini)",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    routing = Routing(agents=("*",), model="policy", name_by=parse_rules(RULES))
    with served(tmp_path_factory.mktemp("naming"), FakeEngine(), routing=routing) as running:
        yield running


@pytest.mark.parametrize(
    ("system", "model", "headers", "agent"),
    [
        ("You are a title generator.", "gpt-5-nano", {}, "title"),
        ("You are a file search specialist.", "gpt-5", {"X-Subagent": "other"}, "explore"),
        ("You code.", "gpt-5", {"x-turn": '{"agent_name":"/root","x":1}'}, "root"),
        ("You code.", "gpt-5", {"X-Subagent": "collab_spawn"}, "collab_spawn"),
        ("You code.", "claude-haiku-4-5", {}, "small"),
        ("You code.", "gpt-5", {}, "main"),  # what its key says
        ("You are a title generator.", "gpt-5", {"x-lightning-agent": "said"}, "said"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_first_rule_that_matches_names_the_agent(request, server, path, system, model, headers, agent):
    name = request.node.name
    user = {"role": "user", "content": "title generator"}  # no system prompt
    body = {
        "/v1/chat/completions": {"messages": [{"role": "system", "content": system}, user]},
        "/v1/responses": {"input": [{"role": "developer", "content": [{"type": "input_text", "text": system}]}, user]},
        "/v1/messages": {"system": [{"type": "text", "text": system}], "messages": [user], "max_tokens": 9},
    }[path]
    key = server.key(name, agent="main")
    reply = httpx.post(
        f"{server.url}{path}", json={"model": model, **body}, headers={"authorization": f"Bearer {key}", **headers}
    )
    assert reply.status_code == 200, reply.text
    assert [call.agent for call in server.calls(name)] == [agent]


def test_tokens_are_counted_by_the_policy_of_the_agent_that_a_rule_names(tmp_path):
    routing = Routing(model="none", policies=parse({"coder": "lora"}), name_by=parse_rules(["coder=system:You code"]))
    with served(tmp_path, FakeEngine(model="coder"), routing=routing) as running:
        body = {"model": "claude", "system": "You code.", "messages": [{"role": "user", "content": "hi"}]}
        counted = httpx.post(
            f"{running.url}/v1/messages/count_tokens", json=body, headers={"x-api-key": running.key("a")}
        )
        assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("rule", ["title", "a=b:c", "system", "a=model", "a=header:x", "system:(", "=model:x", ""])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(ConfigError, match="name-by"):
        parse_rules([rule])


def test_a_rule_without_an_expression_takes_the_whole(server):
    (model, header) = parse_rules(["model", "header:X-Agent"])
    assert model.name_of({}, "gpt-5", {}) == "gpt-5"
    assert header.name_of({}, "", {b"x-agent": b" writer "}) == "writer"
    assert header.name_of({}, "", {}) is None


def test_what_no_rule_names_is_not_the_one_agent_that_is_selected():
    assert default_agent_name("node agent.js", ("writer",)) == "writer"
    assert default_agent_name("claude -p", ("explore",), ("explore=system:search",)) == "agent"
