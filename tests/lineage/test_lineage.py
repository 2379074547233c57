"""From a checkpoint to what it learned from, from a call to its checkpoints, and what a deletion does to them."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import open_store
from lightning_spans.store.deployments import copy_id
from lightning_spans.terms import TERMS, make_terms
from lightning_trainer.cli import cli
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.snapshots import Change, Snapshot
from lightning_trainer.kits.prompts.result import write as write_prompts
from lightning_trainer.lineage.blocks import BLOCKED, block_of, refuse_blocked, search_folder
from lightning_trainer.lineage.facts import read_facts
from lightning_trainer.lineage.manifest import MANIFEST, Manifest, StepSources, mark_checkpoint
from lightning_trainer.lineage.reading import read_lineage

KEY = "LIGHTNING_LINEAGE_KEY_FILE"


def sources(step: int) -> StepSources:
    return StepSources(calls=[f"call-{step}"], rewards=[f"reward-{step}"], traces=[f"{step:032x}"], sources=["run"])


def save(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    mark_checkpoint(run, checkpoint, step)
    (run / "checkpoint").unlink(missing_ok=True)
    (run / "checkpoint").symlink_to(checkpoint.relative_to(run))
    return checkpoint


def make_run(run: Path, model: str = "smollm2-135m", *, steps: int = 4, start: int = 0) -> Path:
    """A run that saved a checkpoint after each step."""
    run.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(run)
    manifest.begin(read_facts({}, model=model, data=[], program=None), 0)
    for step in range(steps):
        manifest.add_step(step, sources(start + step))
        save(run, step + 1)
    return run


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.output


def test_a_checkpoint_lists_what_it_learned_from_also_when_it_is_copied(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first")
    copy = shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "copy")
    shutil.rmtree(run)
    found = invoke("lineage", str(copy), "--json")
    assert (found["calls"], found["rewards"], found["sources"]) == (
        ["call-0", "call-1"], ["reward-0", "reward-1"], ["run"],
    )  # fmt: skip
    assert (found["checkpoints"], found["tainted"], found["model"]) == ([str(copy)], [], "smollm2-135m")


def test_what_was_learned_after_the_step_that_a_run_went_on_from_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=3)
    later = Manifest(run)
    later.begin(read_facts({}, model="smollm2-135m", data=[], program=None), 1)
    later.add_step(1, sources(10))
    again = save(run, 2)
    assert read_lineage(again).all_of("calls") == ["call-0", "call-10"]
    assert read_lineage(run / "checkpoints" / "step-000003").all_of("calls") == ["call-0", "call-1", "call-2"]


def test_a_call_leads_to_the_checkpoints_that_learned_from_it_and_to_those_that_began_with_them(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    first = make_run(runs / "first", steps=2)
    second = make_run(runs / "second", str(first), steps=1, start=20)
    third = make_run(runs / "third", str(second), steps=1, start=30)
    make_run(runs / "other", steps=1, start=40)
    found = invoke("lineage", "call-1", "--runs", str(runs), "--json")
    assert found["checkpoints"] == [str(first / "checkpoints" / "step-000002")]
    assert found["tainted"] == [str(run / "checkpoints" / "step-000001") for run in (second, third)]
    ancestors = invoke("lineage", str(third), "--runs", str(runs), "--json")["checkpoints"]
    assert [Path(folder).parent.parent.name for folder in ancestors] == ["third", "second", "first"]


@pytest.mark.parametrize("known", ["c", "a" * 32, "reward", "acme"])
def test_an_id_is_unknown_unless_a_store_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first", steps=1)
    lost = CliRunner().invoke(cli, ["lineage", known])
    assert (lost.exit_code, "there is no store lightning.db" in lost.output) == (2, True)
    store = open_store("runs/first/lightning.db")
    store.add_calls([live_call("c", 1, "a" * 32, tenant="acme")])
    store.add_rewards([Reward(reward_id="reward", rollout_id="r", attempt_id="r", value=1.0, source="judge")])
    store.close()
    assert f"No checkpoint in runs, loops learned from {known}." in invoke("lineage", known)
    unknown = CliRunner().invoke(cli, ["lineage", "xx"])
    assert unknown.exit_code == 2
    assert "'xx' is unknown" in unknown.output
    assert "not in runs/first/lightning.db" in unknown.output


def test_checkpoints_of_a_loop_are_found_without_naming_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = make_run(tmp_path / "loops/writer/1/run", steps=1), make_run(tmp_path / "runs/first", steps=1)
    found = invoke("lineage", "call-0", "--json")["checkpoints"]
    assert found == [str((folder / "checkpoint").resolve()) for folder in (run, other)]


def test_a_command_may_have_words_that_are_too_long_for_the_name_of_a_file(tmp_path: Path) -> None:
    agent = tmp_path / "agent.js"
    agent.touch()
    facts = read_facts({}, model="m", data=[], program=f"node {agent} --system '{'Be careful. ' * 30}'")
    assert [file["path"] for file in facts.code] == [str(agent)]


def test_an_edited_or_rewritten_manifest_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "lineage.key"
    key.write_bytes(b"0123456789abcdef")
    monkeypatch.setenv(KEY, str(key))
    run = make_run(tmp_path / "first", steps=2)
    monkeypatch.delenv(KEY)
    assert "signed, not checked" in invoke("lineage", str(run))
    assert "signature checked" in invoke("lineage", str(run), "--signing-key", str(key))
    text = (run / MANIFEST).read_text()
    (run / MANIFEST).write_text(text.replace("call-0", "call-9"))
    refused = CliRunner().invoke(cli, ["lineage", str(run)])
    assert refused.exit_code != 0
    assert "line 2: it was changed" in refused.output
    (run / MANIFEST).unlink()  # written anew as a whole, without the call
    forged = Manifest(run)
    forged.begin(read_facts({}, model="smollm2-135m", data=[], program=None), 0)
    forged.add_step(0, sources(8))
    forged.add_step(1, sources(9))
    newest = run / "checkpoints" / "step-000002"
    shutil.copy(run / MANIFEST, newest / MANIFEST)
    with pytest.raises(ConfigError, match="is not the file that"):
        read_lineage(newest)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_deletion_lists_the_checkpoints_and_blocks_them(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "s.db") if kind == "sqlite" else request.getfixturevalue("fresh_postgres")()
    runs, trace = tmp_path / "runs", f"{1:032x}"
    first = make_run(runs / "first", steps=2)
    child = make_run(runs / "child", str(first), steps=1, start=20)
    store = open_store(url)
    store.add_calls(
        [Call(call_id="call-1", response_id="r", start_ns=1, end_ns=2, policy="p", policy_version=0, trace_id=trace)]
    )
    store.close()
    told = invoke("prune", "--trace", trace, "--runs", str(runs), "--block-checkpoints", "--yes", "--store", url)
    assert "deleted: 1" in told
    learned, derived = first / "checkpoints" / "step-000002", child / "checkpoints" / "step-000001"
    assert f"{learned}: learned from 1 of it in step 1. BLOCKED" in told
    assert f"{derived}: started from a checkpoint above. BLOCKED" in told
    assert not (first / "checkpoints" / "step-000001" / BLOCKED).exists()
    assert block_of(learned / "writer") is not None  # an adapter in it
    with pytest.raises(ConfigError, match=r"is blocked: it learned from traces that were deleted.*--allow-blocked"):
        refuse_blocked(first / "checkpoint", allowed=False)
    refuse_blocked(first / "checkpoint", allowed=True)
    assert invoke("lineage", str(child), "--runs", str(runs), "--json")["tainted"] == [str(derived), str(learned)]
    invoke("lineage", str(learned), "--unblock")
    refuse_blocked(learned, allowed=False)


def live_call(call_id: str, days: float, trace_id: str | None = None, **terms: Any) -> Call:
    at = time.time_ns() - int(days * 86_400e9)
    return Call(
        call_id=call_id, response_id=call_id, start_ns=at, end_ns=at, policy="p", policy_version=0, trace_id=trace_id,
        origin="live", sampling={TERMS: make_terms(**terms)},
    )  # fmt: skip


LEARNED = {
    "rollout": StepSources(rollouts=["r"]),
    "trace": StepSources(traces=["a" * 32]),
    "call": StepSources(calls=["call"], traces=["f" * 32]),
    "task": StepSources(rollouts=["another"], tasks=["b" * 32], tenants=["acme"]),
    "example": StepSources(rollouts=["c" * 32], traces=["c" * 32], calls=["of-example"], sources=["origin:live"]),
}
WAYS = {
    "rollout": (("--rollout", "r"), {"rollout"}),
    "trace": (("--trace", "a" * 32), {"trace"}),
    "call": (("--call", "call"), {"call"}),
    "tenant": (("--tenant", "acme"), {"task"}),
    "retention": (("--expired",), {"call"}),
    "age": (("--older-than", "30d"), {"trace", "example"}),
    "origin": (("--origin", "live"), {"trace", "call", "task", "example"}),
    "everything": (("--older-than", "0m"), {"rollout", "trace", "call", "task", "example"}),
}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_delete_blocks_what_learned_from_it_and_leaves_no_copy(
    tmp_path: Path, way: str, kind: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "s.db") if kind == "sqlite" else request.getfixturevalue("fresh_postgres")()
    runs, (arguments, expected) = tmp_path / "runs", WAYS[way]
    for name, learned in LEARNED.items():
        (runs / name).mkdir(parents=True)
        manifest = Manifest(runs / name)
        manifest.begin(read_facts({}, model="m", data=[], program=None), 0)
        manifest.add_step(0, learned)
        save(runs / name, 1)
    store = open_store(url)
    store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
    (attempt,) = store.claim("worker")
    own = {"rollout_id": "r", "attempt_id": attempt.attempt_id}
    calls = {
        "rollout": replace(live_call("of-rollout", 0), **own),
        "trace": live_call("of-trace", 40, "a" * 32),
        "call": live_call("call", 2, retention_days=1),
        "task": live_call("of-task", 1, "b" * 32, tenant="acme"),
        "example": live_call("of-example", 40, "c" * 32),
    }
    store.add_calls(list(calls.values()))
    store.add_calls([replace(live_call(copy_id(one.call_id), 0), origin=SHADOW) for one in calls.values()])
    store.finish(attempt.attempt_id, attempt.fence, status="succeeded")

    told = invoke("prune", *arguments, "--runs", str(runs), "--block-checkpoints", "--yes", "--store", url)
    checkpoints = {name: (runs / name / "checkpoint").resolve() for name in LEARNED}
    assert {name for name, folder in checkpoints.items() if f"{folder}: learned from" in told} == expected
    assert {name for name, folder in checkpoints.items() if block_of(folder) is not None} == expected
    kept = {one.call_id for name, one in calls.items() if name not in expected}
    assert {one.call_id for one in store.calls()} == kept | {copy_id(one) for one in kept}
    store.close()


def test_a_deletion_reaches_the_copies_that_a_search_for_the_best_method_makes(tmp_path: Path) -> None:
    adapters = {}
    for step, agent in enumerate(("writer", "critic")):
        checkpoint = (make_run(tmp_path / "runs" / agent, steps=1, start=step) / "checkpoint").resolve()
        (checkpoint / "adapters.json").write_text("{}")
        (checkpoint / agent).mkdir()
        adapters[agent] = Change(checkpoint=checkpoint)
    prompts = {agent: Change(prompts=make_prompts(tmp_path / "runs" / agent, agent)) for agent in ("planner", "editor")}
    names = {agent: agent for agent in (*adapters, *prompts)}
    config = TrainConfig(target="x:y", data=Path("t.jsonl"), model="smollm2-135m")
    made = Snapshot(tmp_path / "runs" / "improved")
    for _ in range(2):  # a search that is resumed writes it again
        made.write(config, names, {**adapters, **prompts})
    assert made.prompts is not None
    store = str(tmp_path / "s.db")
    open_store(store).close()
    critic_trace = f"{1:032x}"
    invoke("lineage", critic_trace, "--runs", str(tmp_path / "runs"), "--block", "a user withdrew")
    assert "a user withdrew" in str(block_of(made.checkpoint))
    assert block_of(made.prompts) is None
    invoke("lineage", "planner", "--runs", str(tmp_path / "runs"), "--block", "another withdrew")
    candidate = ["deploy", "candidate", "--agent", "planner", "--stable", "gpt", "--base", "gpt", "--store", store]
    refused = CliRunner().invoke(cli, [*candidate, "--checkpoint", str(made.prompts)])
    assert "is blocked: another withdrew" in refused.output
    again = Snapshot(tmp_path / "again")
    again.write(config, names, prompts)
    assert again.prompts is not None
    assert "another withdrew" in str(block_of(again.prompts)), "a copy of what is blocked is blocked"


def make_prompts(folder: Path, agent: str) -> Path:
    """A file of prompts whose search used the trace that is named after the agent."""
    file = folder / "prompts.json"
    write_prompts(file, {agent: "Be brief."}, {agent: "Be kind."}, {})
    search = search_folder(file)
    (search / "lineage").mkdir(parents=True)
    manifest = Manifest(search / "lineage")
    manifest.begin(read_facts({}, model="m", data=[], program=None), 0)
    manifest.add_step(0, StepSources(tasks=[agent]))
    mark_checkpoint(search / "lineage", search, 1)
    return file


def test_a_call_with_other_records_is_not_deleted_alone(tmp_path: Path) -> None:
    url = str(tmp_path / "s.db")
    store = open_store(url)
    store.add_calls([live_call("c", 1, "a" * 32)])
    refused = CliRunner().invoke(cli, ["prune", "--call", "c", "--yes", "--store", url])
    assert (refused.exit_code, f"Give --trace {'a' * 32}." in refused.output) == (2, True)
    assert len(store.calls()) == 1
    store.close()


def test_serve_server_and_deploy_refuse_a_blocked_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    checkpoint = (run / "checkpoint").resolve()
    (checkpoint / "adapters.json").write_text('{"base": "m", "adapters": ["writer"]}')
    adapter = checkpoint / "writer"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 4}')
    invoke("lineage", str(run), "--block", "a user withdrew")
    store = str(tmp_path / "s.db")
    open_store(store).close()
    candidate = ["deploy", "candidate", "--agent", "writer", "--stable", "gpt", "--checkpoint", str(run)]
    candidate += ["--base", "base", "--store", store]
    serving = ["server", "--store", store, "--upstream", "base=http://127.0.0.1:9/v1", "--adapters", str(run)]
    for command in (candidate, serving):
        refused = CliRunner().invoke(cli, command)
        assert refused.exit_code != 0
        assert "is blocked: a user withdrew" in refused.output
    invoke(*candidate, "--allow-blocked")
