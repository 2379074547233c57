"""docs/reference/metrics.md lists every number of a run, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_trainer.backends.verl import report
from lightning_trainer.kits.forks.steps import ForkPlan, count_forks
from lightning_trainer.rl.account import Account

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
LINE = {"held_out", "kind", "step", "time"}
PLACE = re.compile(r"(?:/(?:AGENT|TOOL|FORMAT|NAME|REASON|POLICY|DEPTH|RULE)(?:@VERSION)?)+$")
ON_VERL = {"logprob_correlation", "logprob_seconds", "save_seconds"}

AGENT = """
import openai
import lightning_openai
from lightning_spans import agent
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.schema import spans

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

async def say(name, messages):
    with agent(name):
        reply = await client.chat.completions.create(model="gpt-9", max_tokens=4, messages=messages)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content or ""}]

def look(name):
    tool = live_recorder().start(spans.EXECUTE_TOOL, "search", agent=name, attributes={spans.TOOL_NAME: "search"})
    tool.end()

async def run(task):
    said = await say("writer", [{"role": "user", "content": task["q"]}])
    look("writer")
    said = await say("writer", [*said, {"role": "user", "content": "more"}])
    edited = [{"role": "user", "content": "other"}, *said[1:], {"role": "user", "content": "again"}]
    said = await say("writer", edited)
    await say("checker", [{"role": "user", "content": said[-1]["content"] + "x"}])
    letters = sum(c.isascii() and c.isalpha() for c in said[1]["content"]) / 4
    return {"writer": letters, "checker": 1.0 - letters, "ghost": 1.0}
"""


def documented() -> set[str]:
    """Names in the first column of the table, and those of a policy."""
    cells = re.findall(r"^\| (`[^|]+) \|[^|]*\|[^|]+\|$", DOC, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} | set(re.findall(r"`(\w+/POLICY)`", DOC))


def covers(name: str, number: str) -> bool:
    stem = PLACE.sub("", name)
    return number.startswith(f"{stem}/") if stem != name else number == name


def not_listed(numbers: set[str]) -> set[str]:
    return {number for number in numbers if not any(covers(name, number) for name in documented())}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> set[str]:
    """Every number of a run with an adapter, a value head, tools, automatic rewards and held-out tasks."""
    pytest.importorskip("torch")
    pytest.importorskip("openai")
    from lightning_trainer import TrainConfig, train

    folder = tmp_path_factory.mktemp("watched")
    (folder / "watched_agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(2)))
    options: dict[str, Any] = {
        "target": "watched_agent:run", "data": "tasks.jsonl", "val": "tasks.jsonl", "model": str(tiny_model),
        "policies": "writer=lora,checker=base", "lora_rank": 4, "algorithm": "ppo", "rewards": {"tool_status": 0.1},
        "steps": 1, "batch_size": 2, "group_size": 3, "workers": 1, "timeout_s": 120,
        "backend_options": {"threads": 1}, "out": "out",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(TrainConfig(**options))
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return {number for line in lines if line["kind"] != "alarm" for number in line} - LINE


@pytest.mark.torch
def test_every_number_of_a_run_is_listed(told: set[str]) -> None:
    assert not_listed(told) == set()


@pytest.mark.torch
def test_every_number_that_is_listed_comes(told: set[str]) -> None:
    # Calls that only one side knows of take an agent that is not attached: their account has the name.
    numbers = told | Account(unjoined={"span without a record": 1}).metrics().keys()
    numbers |= {"teacher_kl", "teacher_seconds", "taught_tokens", "calls_forked"}  # of runs with a teacher; reasoning
    numbers |= Account(seen=2, trained=2, taught=1, untaught={"nothing to tell": 1}).metrics().keys()
    numbers |= {*count_forks(ForkPlan(), [], lambda _: []).metrics, "fork_seconds"}  # of runs with forks
    numbers |= {
        "calls_unread",
        "calls_unread/mistral",
        "calls_malformed",
    }  # of models that write calls otherwise, or badly
    numbers |= {"shapley/writer", "shapley_error/writer"}  # of runs with coalitions
    numbers |= {"rule_failures/tool_arguments"}  # of rules that raise
    numbers |= {"infrastructure/engine_down"}  # of an engine that was restarted
    numbers |= {"answers_alike"}  # of calls that nothing names
    numbers |= {"billed_prompt", "billed_sampled", "billed_trained", "billed_unmerged"}  # of a Tinker server
    numbers |= {"cost", "cost_unmerged", "cost_total"}  # likewise, if prices are known
    numbers |= {"gpu_memory_bytes"}  # of a GPU
    numbers |= {"prompts", "new_prompts/writer"}  # of two validations
    numbers |= {f"from_best{end}{agent}" for end in ("", "_low", "_high") for agent in ("", "/writer")}  # likewise
    numbers |= {"kl_base/writer", "entropy/writer"}  # of adapters, and of several agents
    numbers |= {"gradient_share/writer", "token_share/writer", "policy_of"}  # of several agents
    numbers |= {"engine_gap/writer/256", "importance_masked", "importance_capped"}  # of an engine with older weights
    numbers |= {"dead_groups", "dead_groups_due", "instructed_groups", "instructed_groups_solved"}  # of with_prompts
    numbers |= {"instruction_proposals", "instruction_tokens", "instruction_seconds"}  # likewise
    numbers |= {"distilled_calls", "distilled_tokens"}  # likewise
    numbers |= {"turn/writer", "baseline/writer"}  # of schedules, and of role baselines
    numbers |= {"judge_agreement", "reward_against/writer@3"}  # of a second judge, and of opponents
    assert {name for name in documented() if not any(covers(name, number) for number in numbers)} == set()


def test_what_verl_tells_under_our_names_is_listed() -> None:
    ours = set(report.ours(dict.fromkeys(report._NAMES, 0.0)))
    assert not_listed(ours) == ON_VERL - {"logprob_correlation"}
    assert {name for name in ON_VERL if f"`{name}`" not in DOC} == set()
