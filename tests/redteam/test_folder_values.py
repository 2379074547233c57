"""Attacks with a stranger's run folder: values of every type in place of each value of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_spans.store.traces import each_trace
from lightning_trainer.cli import cli
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.kits.evaluation.folder import read_options, read_samples
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs
from lightning_trainer.report.log.lines import read
from lightning_trainer.run.state import STATE_NAME, State, read_state
from support.strange_values import DEEP, VALUES, places, replace_at
from support.training.example_runs import make_run

# What runs write beside numbers.
OF_VALIDATIONS = {"held_out": "x", "prompts": {"planner": ["aa"]}, "most_frequent": {"planner": ["yes", 0.5]}}
OF_STEPS = {
    "waited_for": "sampling", "policy_of": {"planner": "a", "solver": "b"}, "most_frequent": {"planner": ["yes", 0.5]},
    "tokens_generated": 5.0, "tokens_prompt": 6.0, "gradient_share/planner": 0.1, "token_share/planner": 0.5,
}  # fmt: skip
PAGES = (
    "run", "scale", "step", "group", "tries", "rollout", "call", "account", "credit", "rewards", "tools", "fleet",
    "loose", "search", "marks", "facts",
)  # fmt: skip
EVENTS = (
    {"kind": "alarm", "step": 3, "time": 1.0, "name": "cliff", "text": "It fell.", "steps_taken": 3},
    {"kind": "rollback", "step": 3, "time": 1.0, "policy": "planner", "reward": 1.0},
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Path:
    """A folder of runs: one that is left alone, and one that is changed."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "good", steps=1, groups=1, size=2)
    changed = make_run(folder / "changed", steps=4, groups=1, size=2)
    lines = [json.loads(text) for text in (changed / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, **(OF_STEPS if line["kind"] == "train" else OF_VALIDATIONS)} for line in lines]
    (changed / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *EVENTS]))
    return folder


@pytest.fixture(scope="module")
def look(shown):
    """Requests a page of the changed run; it fails at what a page raises."""
    keys = Keys.fresh()
    client = TestClient(create_view(Views(Runs(shown)), keys))
    headers = {"authorization": f"Bearer {keys.issue('viewer')}"}
    store = open_store(str(shown / "changed" / "lightning.db"))
    trace = next(iter(each_trace(store)))
    group = next(each.group_id for each in store.rollouts() if each.rollout_id == trace.rollout_id)
    store.close()
    named = {
        "step": {"step": 0}, "account": {"step": 0}, "search": {"text": "What"}, "group": {"group": group},
        "rollout": {"rollout": trace.rollout_id}, "facts": {"rollout": trace.rollout_id},
        "call": {"rollout": trace.rollout_id, "span": trace.chats[0].span.span_id},
    }  # fmt: skip

    def ask(page: str) -> str:
        answer = client.get(f"/api/view/{page}", params={"run": "changed", **named.get(page, {})}, headers=headers)
        assert answer.status_code < 500, answer.text
        return answer.text

    return ask


def command(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.output


def test_the_lines_of_a_run_are_read_whole(shown, caplog):
    texts = (shown / "changed" / "metrics.jsonl").read_text().splitlines()
    assert read(shown / "changed" / "metrics.jsonl") == list(map(json.loads, texts))
    assert caplog.messages == []


def test_what_is_wrong_is_left_out_with_one_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind": "train", "step": 0, "reward": 1.0, "loss": NaN}\n{"kind": "train", "step": 1, "reward": [1]}\n5\n'
    )
    for _ in range(2):
        first, second = read(path)
    assert (first["reward"], second) == (1.0, {"kind": "train", "step": 1})
    assert caplog.messages == [
        f"{path}, line 2: 'reward' can't be a list (2 lines have such errors). Invalid lines are left out."
    ]


@pytest.mark.timeout(120)
def test_numbers_of_any_type_fail_neither_their_run_nor_the_others(shown, look, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_trainer"), "disabled", True)
    monkeypatch.chdir(shown.parent)
    path = shown / "changed" / "metrics.jsonl"
    whole = path.read_text()
    lines = [json.loads(text) for text in whole.splitlines()]
    cases = [(line, place, value) for line in range(len(lines)) for place in places(lines[line]) for value in VALUES]
    for line, place, value in random.Random(0).sample(cases, 60):
        texts = [
            *map(json.dumps, lines[:line]),
            replace_at(lines[line], place, value),
            *map(json.dumps, lines[line + 1 :]),
        ]
        path.write_text("\n".join(texts) + "\n")
        assert "good" in command("runs", shown.name)
        assert "good" in look("runs")
        for page in ("run", "scale", "step", "account"):
            look(page)
    path.write_text(whole)


@pytest.mark.timeout(120)
def test_options_of_any_type_fail_neither_their_run_nor_the_others(shown, look, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning_trainer"), "disabled", True)
    path, changed = shown / "changed" / "config.json", str(shown / "changed")
    whole = path.read_text()
    options = json.loads(whole)
    cases = [(place, value) for place in places(options, 2) for value in VALUES]
    for place, value in [*random.Random(0).sample(cases, 20), (("name_by",), DEEP)]:
        path.write_text(replace_at(options, place, value))
        assert "good" in command("runs", str(shown), "--json")
        assert "good" in look("runs")
        command("blame", changed)
        for page in PAGES:
            look(page)
    path.write_text(whole)


@pytest.mark.timeout(120)
def test_a_tokenizer_of_any_shape_fails_no_page(shown, look):
    path = shown / "changed" / "checkpoint" / "tokenizer.json"
    whole = path.read_text()
    described = {**json.loads(whole), "decoder": {"type": "Metaspace"}}
    described["model"]["vocab"] = dict(list(described["model"]["vocab"].items())[:5])
    cases = [(place, value) for place in places(described, 3) for value in VALUES]
    for place, value in random.Random(0).sample(cases, 40):
        path.write_text(replace_at(described, place, value))
        look("call")
    path.write_text(whole)


def test_what_updates_saw_is_bounded_in_memory(shown, look):
    path = shown / "changed" / "tokens" / "0.npz"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as parts:
        kept = {name: parts.read(name) for name in parts.namelist()}
    for name, header in product(kept, ("(1099511627776,)", "(-1,)", "()", "(0, 0)")):
        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {header}}}".encode()
        part = b"\x93NUMPY\x01\x00" + (len(head) + 1).to_bytes(2, "little") + head + b"\n"
        with zipfile.ZipFile(path, "w") as parts:
            for each, content in {**kept, name: part}.items():
                parts.writestr(each, content)
        look("call")
    path.write_bytes(whole)


def test_a_state_of_any_type_is_one_error_or_is_one(tmp_path):
    state = State(step=3, identity={"data": "x"}, agents=("writer",), kept={"spread": 0.5}, rewards=(0.5, None))
    state = replace(state, successes={"writer": {"task": (1.0, 2.0)}}, slowed={"writer": 0.1})
    path, whole = tmp_path / STATE_NAME, asdict(state)
    path.write_text(json.dumps(whole))
    assert read_state(tmp_path) == state
    for place, value in [(place, value) for place in places(whole, 3) for value in VALUES]:
        path.write_text(replace_at(whole, place, value))
        with suppress(ConfigError):
            read = read_state(tmp_path)
            assert [type(each) for each in (read.step, read.seconds, read.agents)] == [int, float, tuple]


@pytest.mark.parametrize("text", ["[]", "5", "{}", '{"config": []}', DEEP, "[" * 100_000, '"x"'])
def test_files_of_an_evaluation_that_are_none_are_one_error(tmp_path, text):
    (tmp_path / "eval.json").write_text(text)
    (tmp_path / "samples.jsonl").write_text(f"{text}\n")
    for read_file in (read_options, read_samples):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            read_file(tmp_path)


@pytest.mark.timeout(120)
def test_a_lineage_of_any_type_is_one_error(tmp_path):
    values = {"calls": ["c"], "rewards": ["r"], "prompts": {"planner": ["aa"]}, "sources": ["run"]}
    lines = [
        {
            "kind": "begin",
            "step": 0,
            "at_ns": 1,
            "model": "tiny",
            "parent": None,
            "data": [{"path": "x", "sha256": "0"}],
            "options": "",
        },
        {"kind": "step", "step": 0, "at_ns": 2, **values},
    ]
    pointer = {"lines": 2, "head": "", "steps": 1, "run": str(tmp_path)}
    cases = [
        (n, place, v) for n, each in enumerate([*lines, pointer]) for place in places(each) if place for v in VALUES
    ]
    known = [(2, (), "[]"), (2, (), DEEP), (0, ("model",), '"tiny"')]
    for number, place, value in [*random.Random(0).sample(cases, 60), *known]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "checkpoint"
        folder.mkdir()
        texts = [json.dumps(each) if n != number else replace_at(each, place, value) for n, each in enumerate(lines)]
        head = write_chain(folder / "lineage.jsonl", texts)
        told = {**pointer, "head": head}
        (folder / "lineage.json").write_text(replace_at(told, place, value) if number == 2 else json.dumps(told))
        output = command("lineage", str(folder), "--json", "--runs", str(folder.parent))
        command("lineage", str(folder), "--runs", str(folder.parent))
        command("lineage", "c", "--runs", str(folder.parent), "--json")
    assert '"sources"' in output  # the last one is whole


def write_chain(path: Path, texts: list[str]) -> str:
    """Write lines with hashes that fit them, as a stranger can; return the last one."""
    before = ""
    with path.open("w") as file:
        for number, text in enumerate(texts, 1):
            values = json.loads(text)
            line = {**values, "n": number, "prev": before} if isinstance(values, dict) else {}
            hashed = json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
            before = hashlib.sha256(hashed).hexdigest()
            file.write(json.dumps({**line, "hash": before}) + "\n")
    return before
