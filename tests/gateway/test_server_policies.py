"""Several policies behind one gateway: each agent's calls go to its own, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from lightning_trainer.gateway.settings import Routing
from lightning_trainer.policies import parse
from support.fakes import FakeEngine, Served, served

USER = [{"role": "user", "content": "hello"}]


def scripted(name: str, version: int) -> FakeEngine:
    return FakeEngine(lambda _: f"{name} speaking", model=name, version=version)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("policies")
    engines = [scripted("base", 0), scripted("writer", 3), scripted("team", 5)]
    routing = Routing(model="policy", policies=parse({"writer": "lora", "re*": "lora:team", "judge": "base"}))
    with served(folder, engines, routing=routing) as running:  # type: ignore[arg-type]
        yield running


def ask(server: Served, agent: str | None, *, model: str = "gpt-9", key: str | None = None) -> str:
    headers = {} if agent is None else {"x-lightning-agent": agent}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or server.key("a"), max_retries=0) as client:
        reply = client.chat.completions.create(model=model, messages=USER, extra_headers=headers)
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("agent", "policy"), [("writer", "writer"), ("rewriter", "team"), ("reader", "team"), ("judge", "base")]
)
def test_each_agent_is_answered_by_its_own_policy_whatever_model_it_asks_for(
    server: Served, agent: str, policy: str
) -> None:
    attempt = f"attempt of {agent}"
    assert ask(server, agent, key=server.key(attempt)) == f"{policy} speaking"
    (call,) = server.calls(attempt)
    assert (call.agent, call.policy) == (agent, policy)
    assert call.policy_version == {"base": 0, "writer": 3, "team": 5}[policy]


@pytest.mark.parametrize(("agent", "sampled"), [("writer", (1.2, 1.0)), ("judge", (0.0, 0.1)), ("critic", (0.0, 0.1))])
def test_only_agents_that_may_learn_get_the_temperature_of_training(
    tmp_path: Path, agent: str, sampled: tuple[float, float]
) -> None:
    engines = [scripted("base", 0), scripted("writer", 3), scripted("old", 1)]
    policies = parse({"writer": "lora", "judge": "base", "critic": "fixed:old"})
    routing = Routing(model="policy", policies=policies, temperature=1.2, plain=True)
    with served(tmp_path, engines, routing=routing) as running:  # type: ignore[arg-type]
        headers = {"x-lightning-agent": agent}
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key("a"), max_retries=0) as client:
            client.chat.completions.create(model="x", messages=USER, temperature=0, top_p=0.1, extra_headers=headers)
        (call,) = running.calls("a")
    assert (call.sampling["temperature"], call.sampling["top_p"]) == sampled


def test_what_an_engine_can_not_do_for_a_frozen_agent_is_left_out_and_recorded(tmp_path: Path) -> None:
    engines = [scripted("base", 0), scripted("writer", 3)]
    engines[0].abilities = frozenset()
    routing = Routing(model="policy", policies=parse({"writer": "lora", "judge": "base"}), plain=True)
    with served(tmp_path, engines, routing=routing) as running:  # type: ignore[arg-type]
        headers = {"x-lightning-agent": "judge"}
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.key("a"), max_retries=0) as client:
            client.chat.completions.create(
                model="x", messages=USER, presence_penalty=1.0, top_p=0.5, extra_headers=headers
            )
        (call,) = running.calls("a")
    assert "presence_penalty" not in call.sampling
    assert (call.sampling["presence_penalty_asked"], call.sampling["top_p"]) == (1.0, 0.5)


def test_program_that_is_not_attached_may_ask_for_a_policy_by_name(server: Served) -> None:
    assert ask(server, None, model="team") == "team speaking"


def test_call_that_fits_no_policy_is_refused_and_says_what_to_do(server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=r"Models: base, writer, team.*send x-lightning-agent"):
        ask(server, None)
    with pytest.raises(openai.NotFoundError, match="no model 'policy' here"):
        ask(server, "stranger")


def test_admin_gets_the_model_that_it_names(server: Served) -> None:
    assert ask(server, "writer", model="base", key=server.keys.issue("admin")) == "base speaking"


def test_all_policies_are_listed_and_watched(server: Served) -> None:
    key = {"authorization": f"Bearer {server.key('a')}"}
    listed = httpx.get(f"{server.url}/v1/models", headers=key).json()["data"]
    assert [model["id"] for model in listed] == ["base", "writer", "team"]
    health = httpx.get(f"{server.url}/healthz").json()
    assert health["engine"]["policies"] == {"base": 0, "writer": 3, "team": 5}
