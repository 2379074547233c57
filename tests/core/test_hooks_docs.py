"""The example of docs/reference/hooks.md, run."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from lightning_spans import attach, hookimpl, hooks, open_store
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.schema import spans as names

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)


class Toy:
    @hookimpl
    def lightning_attach(self, framework, recorder):
        return (lambda: None) if framework == "toy" else None


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hooks.register(Toy(), "toy")
    exec(compile(EXAMPLE, "docs/reference/hooks.md", "exec"), {"__name__": "example"})
    yield hooks.manager().get_plugin("mine")
    hooks.unregister("mine")
    hooks.unregister("toy")


def call(*, system=None, agent=None, took_s=1, tokens=5):
    said = [{"role": "system", "content": system}] if system else []
    request = json.dumps({"messages": [*said, {"role": "user", "content": "hi"}]})
    span = live_recorder().start(names.CHAT, "m", agent=agent, start_ns=10**18, attributes={names.REQUEST: request})
    span.end(attributes={names.OUTPUT_TOKENS: tokens}, end_ns=10**18 + int(took_s * 1e9))


def test_the_example_names_agents_counts_tokens_and_tells_of_slow_calls(example, caplog):
    with caplog.at_level(logging.WARNING), attach("toy") as attachment:
        call(system="You are the writer. Be brief.")
        call(system="You are the writer. Be brief.", took_s=31)
        call(agent="checker", system="You are the writer.")
        call()
        assert attachment.flush(60.0)
    store = open_store("lightning.db")
    agents = sorted(str(span.agent) for span in store.spans())
    store.close()
    assert agents == ["None", "checker", "writer", "writer"]
    assert example.tokens == {"writer": 10, "checker": 5, None: 5}
    assert [record.message for record in caplog.records if record.name == "example"] == [
        "chat of writer took more than 30 s"
    ]


def test_the_page_lists_every_hook():
    specified = {name for name in vars(hooks) if name.startswith("lightning_")}
    assert specified == set(re.findall(r"`(lightning_[a-z_]+)[(`]", DOC.split("| hook |")[1]))
