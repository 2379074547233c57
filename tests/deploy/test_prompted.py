"""A prompt is a policy like an adapter: named, tried, promoted and rolled back, without a change of the program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import Call
from lightning_spans.store import open_store
from lightning_spans.store.protocol import each
from lightning_trainer.kits.deploy.policies.candidates import read_policy
from lightning_trainer.kits.deploy.policies.prompted import PROMPTED, serve_prompt
from lightning_trainer.kits.deploy.transitions import begin_canary, name_candidate, promote, roll_back
from lightning_trainer.kits.prompts.result import write
from support.cli import call, told
from support.fakes import FakeEngine
from support.gateway.deployed import Deployed, deployed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "prompts.json", {"writer": "Be brief."}, {"writer": "Be kind."}, {})
    return tmp_path / "prompts.json"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Deployed]:
    """A gateway whose model repeats its prompt."""
    with deployed(tmp_path / "server", engine=FakeEngine(lambda prompt: prompt, model="old")) as running:
        yield running


def ask(here: Deployed, conversation: str, system: str = "You write. Be brief.") -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
    reply = here.client(conversation).chat.completions.create(model="old", messages=messages)
    return str(reply.choices[0].message.content)


def test_a_prompt_answers_its_share_and_a_rollback_ends_it(here: Deployed, file: Path) -> None:
    policy = read_policy("writer", file, None, "old", None)
    here.change(name_candidate, policy, stable="old")
    assert here.loader.problems == {}
    assert "Be brief." in ask(here, "before")
    here.change(begin_canary, 1.0)
    assert "You write. Be kind." in ask(here, "canary")
    here.change(promote)
    assert "Be kind." in ask(here, "stable")
    assert "Be short." in ask(here, "another", "Be short."), "a program that was changed keeps its own prompt"
    here.change(roll_back)
    assert "Be brief." in ask(here, "canary")
    calls = list(each(here.server.store, Call))
    assert [one.policy for one in calls] == ["old", policy.name, policy.name, policy.name, "old"]
    assert [one.sampling.get(PROMPTED) for one in calls] == [None, True, True, False, None]
    systems = [one.request["messages"][0]["content"] for one in calls]
    assert systems == ["You write. Be brief."] * 3 + ["Be short.", "You write. Be brief."], "as the program sent them"


def test_a_changed_file_or_one_without_the_agent_is_refused(here: Deployed, file: Path) -> None:
    policy = read_policy("writer", file, None, "old", None)
    write(file, {"writer": "Be brief."}, {"writer": "Be rude."}, {})
    with pytest.raises(ConfigError, match="has changed since writer@prompts-"):
        serve_prompt(policy, here.server.app.state.models.by_name()["old"])
    with pytest.raises(ConfigError, match=r"has no prompt for reader\. It has prompts for: writer"):
        read_policy("reader", file, None, "old", None)


def test_the_command_names_a_prompt(tmp_path: Path, file: Path) -> None:
    store = tmp_path / "s.db"
    open_store(str(store)).close()
    given = ("--agent", "writer", "--stable", "gpt", "--store", store, "--checkpoint", file)
    told(call("deploy", "candidate", *given), "--checkpoint needs --base")
    result = call("deploy", "candidate", *given, "--base", "gpt", "--json")
    assert json.loads(result.stdout)["agents"]["writer"]["candidate"].startswith("writer@prompts-"), result.output
    told(
        call("deploy", "estimate", "--agent", "writer", "--server", "http://127.0.0.1:9", "--store", store), "a prompt"
    )
