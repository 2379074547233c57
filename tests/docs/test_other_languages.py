"""The programs of docs/reference/protocol.md and docs/how-to/other-languages.md, run as `--command` runs them."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.rewards import as_rewards
from lightning_trainer.runner.worker.command import CommandError, environment, result_of, run_command
from support.fakes import FakeEngine, served

AGENTS = Path(__file__).parent / "programs"
DOCS = Path(__file__).parents[2] / "docs"
TASK = {"message": "Please refund the lamp.", "kind": "refund", "order": 17}


def command(name: str) -> list[str]:
    """What starts a program, if what it needs is on this machine."""
    words = {"agent.js": ["node"], "agent.go": ["go", "run"], "agent.sh": ["bash"]}[name]
    missing = [tool for tool in [words[0], *(["curl", "jq"] if name == "agent.sh" else [])] if not shutil.which(tool)]
    if missing:
        pytest.skip(f"not on this machine: {', '.join(missing)}")
    return [*words, str(AGENTS / name)]


@pytest.fixture
def attempt(tmp_path):
    """An attempt whose model calls the gateway answers, and the server."""

    def answer(prompt: str) -> str:
        return "refund" if "one word" in prompt else "It is on its way."

    with served(tmp_path, FakeEngine(answer)) as server:
        yield (
            Attempt(
                rollout_id="rollout of a", attempt_id="a", endpoint=server.url, key=server.key("a"),
                agents=("sorter", "writer"), model="policy",
            ),
            server,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("agent.js", {"sorter": 1.0, "writer": 1.0}),
        ("agent.go", {"sorter": 1.0, "writer": 1.0}),
        ("agent.sh", {"sorter": 1.0}),
    ],
)
async def test_a_program_of_another_language_is_told_apart_by_agent_and_gives_rewards(name, rewards, attempt):
    words = command(name)
    context, server = attempt
    assert as_rewards(result_of((await run_command(words, TASK, context)).output)["reward"]) == rewards
    calls = server.calls("a")
    assert sorted(str(call.agent) for call in calls) == sorted(rewards)
    assert all(call.choices[0].token_ids for call in calls)


@pytest.mark.parametrize(("order", "status"), [(17, "ok"), (18, "error")])
async def test_a_tool_of_another_language_is_told_with_its_agent_and_fate(order, status, attempt):
    words = command("agent.js")
    context, server = attempt
    await run_command(words, {**TASK, "order": order}, context)
    (span,) = server.store.spans(attempt_ids=["a"])
    assert (span.operation, span.agent, span.status) == ("execute_tool", "writer", status)


async def test_a_program_that_is_refused_fails_with_its_own_words(attempt):
    words = command("agent.js")
    context, server = attempt
    server.end("a")
    with pytest.raises(CommandError, match="this key's attempt has ended"):
        await run_command(words, TASK, context)


def test_the_page_lists_every_variable_that_a_command_gets():
    page = (DOCS / "reference" / "protocol.md").read_text(encoding="utf-8")
    attempt = Attempt(rollout_id="r", attempt_id="a", endpoint="http://x", key="k", agents=("b",), model="m")
    given = set(environment(attempt, b"{}"))
    assert given == set(re.findall(r"^\| `([A-Z_]+)`", page, flags=re.MULTILINE))


def test_the_page_shows_each_of_the_programs():
    pages = "".join((DOCS / name).read_text() for name in ("reference/protocol.md", "how-to/other-languages.md"))
    for program in AGENTS.iterdir():
        assert f"<!-- snippet: tests/docs/programs/{program.name}" in pages
        assert shlex.quote(program.name) in pages
