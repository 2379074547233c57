"""`lightning-rl loop`: killed anywhere, the same command continues, does nothing twice and makes no approval."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spans.errors import ConfigError, StoreError
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store, open_store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.http import HttpStore
from lightning_spans.terms import TERMS, make_terms
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.kits.deploy.approvals import Approvals, guard_promotions
from lightning_trainer.kits.deploy.routing import MARK
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Note, roll_back
from lightning_trainer.kits.loop import deployment, learning, record, selection
from lightning_trainer.kits.loop.loop import LoopPace, loop
from lightning_trainer.kits.loop.methods import adapter, prompt, search
from lightning_trainer.kits.loop.methods.names import METHODS
from lightning_trainer.kits.loop.reading import read_loop
from lightning_trainer.kits.prompts import journal
from lightning_trainer.kits.prompts.result import write as write_prompts
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.session.answers import Endpoint
from support.cli import call, told
from support.fakes import FakeEngine

KINDS = ["candidate", "shadow", "canary", "canary", "stable"]  # rows of a round; the second canary is the approval
TRACES = 15
CONFIG = """
agent = "writer"
base = "base"
stable = "old"

[select]
least = 10
min_age_minutes = 0

[train]
model = "./model"
steps = 3

[shadow]
copies = 20

[canary]
share = 0.5
"""

TRAIN = """[train]
model = "./model"
steps = 3
"""
TABLES = {
    "train": TRAIN,
    "improve": '[train]\nmodel = "smollm2-135m"\nmethod = "improve"\nbudget = 1000\nreflect = "http://r/v1"\n',
    "prompts": '[train]\nmethod = "prompts"\nmodel = "old=http://m/v1"\nreflect = "http://r/v1"\nbudget = 100\n',
    "model": '[train]\nmethod = "model"\nserved = "next"\nendpoint = "next=http://n/v1"\nreward = "program:score"\n'
    '\n[evaluate]\nagainst = "old=http://m/v1"\n',
}
CANDIDATES = {
    "train": re.compile("writer@[0-9a-f]+$"),
    "improve": re.compile("writer@prompts-"),
    "prompts": re.compile("writer@prompts-"),
    "model": re.compile("next$"),
}


@dataclass
class Site:
    """A store with live traces, and users and an approver who do their part after each call of the loop."""

    folder: Path
    better: bool = True
    approves: bool = True
    traces: int = 0
    quality: float = 0.1
    events: int = 0
    killed_at: int | None = None
    url: str | None = None
    load: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "lightning.db"

    @property
    def out(self) -> Path:
        return self.folder / "loops" / "writer"

    def use(self, method: str) -> None:
        """Configure a learning method."""
        (self.folder / "loop.toml").write_text(CONFIG.replace(TRAIN, TABLES[method]))

    def record_traces(self, count: int) -> None:
        with closing(open_store(str(self.path))) as store:
            store.add_calls([live_call(self.traces + place) for place in range(count)])
        self.traces += count

    def call(self, *more: str) -> Any:
        where = ("--store", self.url or self.path, "--key-file", self.folder / "lightning.key")
        return call("loop", "program:run", "--config", self.folder / "loop.toml", *where, "--no-wait", *more)

    def history(self) -> list[Deployment]:
        with closing(open_store(str(self.path))) as store:
            return read_histories(store).get("writer", [])

    def write(self, row: Deployment) -> None:
        with closing(open_store(str(self.path))) as store:
            keep(store, row)

    def live(self) -> None:
        """Users call the agent, and the approver approves a candidate that the gate would promote."""
        history = self.history()
        last = history[-1] if history else None
        if last is not None and last.stage == "shadow":
            with closing(open_store(str(self.path))) as store:
                store.add_calls([copy_of(place, last.number) for place in range(20)])
        if last is not None and last.stage == "canary":
            status = (self.out / record.STATUS_NAME).read_text()
            if "a person's approval" in status and self.approves:
                self.write(self.approval(history))
            elif "approval" not in last.reason:
                self.reward(last)

    def approval(self, history: list[Deployment]) -> Deployment:
        keys = Keys.from_file(self.folder / "lightning.key.secret")
        return Approvals(keys).approve(history, "writer", keys.check(keys.issue("approver", holder="ada")), "approval")

    def reward(self, row: Deployment) -> None:
        with closing(open_store(str(self.path))) as store:
            for policy, value in ((row.candidate, float(self.better)), (row.stable, 1.0 - self.better)):
                names = [f"conversation:{row.number} {policy} {place}" for place in range(150)]
                given = {"agent": "writer", "policy": str(policy), "number": row.number}
                store.add_assignments([Assignment(**given, attempt_id=name) for name in names])
                store.add_rewards(
                    [Reward(rollout_id=name, attempt_id=name, value=value, reward_id=name) for name in names]
                )

    def finish(self) -> None:
        """Call the loop until the round ends."""
        for _ in range(10):
            result = self.call("--json")
            assert result.exit_code == 0, result.output
            if json.loads(result.stdout.splitlines()[-1])["rounds"][-1]["outcome"]:
                return
            self.live()
        raise AssertionError((self.out / record.STATUS_NAME).read_text())

    def reset(self) -> None:
        shutil.rmtree(self.out)
        for path in [self.folder / "effects.txt", *self.folder.glob("lightning.db*")]:
            path.unlink()
        self.traces = 0
        self.record_traces(TRACES)

    def step(self) -> None:
        """Be killed here, if it is the turn."""
        self.events += 1
        if self.killed_at == self.events:
            os._exit(9)

    def effect(self, name: str) -> None:
        with (self.folder / "effects.txt").open("a") as file:
            file.write(f"{name}\n")

    def effects(self) -> list[str]:
        return (self.folder / "effects.txt").read_text().split("\n")[:-1]


def live_call(place: int, **terms: Any) -> Call:
    terms = terms or make_terms(consent=True)
    message = {"role": "assistant", "content": "fine"}
    return Call(
        call_id=f"live {place}", response_id=f"live {place}", start_ns=1000 + place, end_ns=2000 + place, policy="old",
        policy_version=0, agent="writer", origin="live", choices=(Choice(0, None, None, "stop", message),),
        request={"messages": [{"role": "user", "content": f"question {place}"}]}, sampling={TERMS: terms},
    )  # fmt: skip


def copy_of(place: int, number: int) -> Call:
    side = {"prompt_tokens": 1, "completion_tokens": 1, "seconds": 1.0, "rules": []}
    mark = {"agent": "writer", "conversation": f"{place}", "of": "x", "kind": "text", "agrees": True, "stable": side,
            "candidate": side, "dropped": 0, "off path": 0}  # fmt: skip
    name = f"copy {number} {place}"
    return replace(live_call(place), call_id=name, origin=SHADOW, sampling={MARK: number, SHADOW: mark})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose training and evaluation are fakes that take three steps each, and are resumed like the real ones."""
    site = Site(tmp_path)
    monkeypatch.chdir(tmp_path)
    keys = Keys.from_file(tmp_path / "lightning.key.secret")
    (tmp_path / "lightning.key").write_text(keys.issue("admin"))
    (tmp_path / "loop.toml").write_text(CONFIG)
    site.record_traces(TRACES)

    def train(run: Any, _: Any) -> Any:
        folder = run.resume or run.out
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(run.model_dump_json())
        for step in range(1, 4):
            made = folder / f"step-{step}"
            if not made.exists():
                site.step()
                site.effect(f"{folder.parent.name} step {step} from {run.model}")
                adapter = made / "writer"
                adapter.mkdir(parents=True)
                (made / "adapters.json").write_text(json.dumps({"adapters": ["writer"]}))
                (adapter / "adapter_config.json").write_text("{}")
                (adapter / "adapter_model.bin").write_text(f"{folder.parent.name} {step}")
                (folder / "checkpoint").unlink(missing_ok=True)
                (folder / "checkpoint").symlink_to(made.name)
        return SimpleNamespace(best=None, checkpoint=folder / "checkpoint", steps=3)

    def evaluate(config: Any, _: Any, *, resume: Path | None = None, keys: Any) -> Any:
        folder = resume or config.out
        if resume is None:
            folder.mkdir()
            site.load = config.load
            (folder / "eval.json").write_text("{}")
            site.effect(f"{folder.parent.name} evaluates {Path(config.model).name} against {config.against}")
        site.step()
        names = ("difference", "difference_low", "difference_high", "difference_tasks")
        found = {**dict(zip(names, (site.quality, 0.0, 0.2, 2), strict=True)), "program": {"agents": {}, "always": []}}
        return SimpleNamespace(failure=None, to_json=lambda: found)

    def write(path: Path, data: bytes) -> None:
        if path.name not in (record.STATUS_NAME, "waiting.json"):  # which decide nothing
            site.step()
        write_atomically(path, data)

    def keep_row(store: Store, row: Deployment) -> None:
        site.step()
        keep(store, row)

    def improve(config: Any, _: Any, *, out: Path | None = None, resume: Path | None = None) -> Any:
        folder = resume or out
        folder.mkdir(exist_ok=True)
        (folder / "improve.json").touch()
        prompts = folder / "prompts.json"
        if not prompts.exists():
            site.step()
            site.effect(f"{folder.parent.name} improves {config.train.model}")
        write_prompts(prompts, {"writer": "Be brief."}, {"writer": "Be kind."}, {})
        decision = SimpleNamespace(kept=("writer",) if site.quality > 0 else ())
        agents = {"writer": SimpleNamespace(tokens=9)}
        return SimpleNamespace(agents=agents, decision=decision, method_of=lambda _: "prompts", prompts=prompts)

    def optimise(config: Any, _: Any, *, resume: bool = False) -> Any:
        search = config.out.with_name(f"{config.out.name}.search")
        assert resume == search.exists()
        search.mkdir(exist_ok=True)
        (search / journal.FILE).touch()
        if not config.out.exists():
            site.step()
            site.effect(f"prompts for {config.subject.url}")
        write_prompts(config.out, {"writer": "Be brief."}, {"writer": "Be kind."}, {})
        return SimpleNamespace(rollouts=9, diff="+ kind" if site.quality > 0 else "", file=config.out)

    monkeypatch.setattr(adapter, "train", train)
    monkeypatch.setattr(adapter, "read_config", lambda folder: without_none(folder / "config.json"))
    monkeypatch.setattr(search, "improve", improve)
    monkeypatch.setattr(prompt, "optimise", optimise)
    for module in (search, prompt):
        monkeypatch.setattr(module, "read_reflection", lambda text, _: Endpoint(text))
    again = SimpleNamespace(train=SimpleNamespace(model="smollm2-135m"))
    monkeypatch.setattr(search.search, "read_options", lambda *_: again)
    monkeypatch.setattr(learning, "evaluate", evaluate)
    monkeypatch.setattr(learning, "config_to_resume", lambda *_: None)
    for module in (selection, record):
        monkeypatch.setattr(module, "write_atomically", write)
    monkeypatch.setattr(deployment, "keep", keep_row)
    return site


def without_none(path: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(path.read_text()).items() if value is not None and name != "out"}


def stages_of(site: Site) -> Mapping[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in (site.out / "1").glob("*.json")}
    return {name: value for name, value in found.items() if name not in ("options.json", "waiting.json")}


def rows_of(site: Site) -> list[Any]:
    names = ("number", "stage", "stable", "candidate", "share", "actor", "reason")
    return [[getattr(row, name) for name in names] for row in site.history()]


def test_a_round_goes_from_traces_to_a_promotion_and_the_next_takes_newer_traces(site: Site) -> None:
    site.finish()
    assert [row.stage for row in site.history()] == KINDS
    assert site.history()[-1].actor == "loop"
    policy = site.history()[-1].stable
    assert policy.startswith("writer@")
    assert "round 1: promoted" in call("loop", "--status", "--out", site.out).stdout
    waits = site.call()
    assert waits.exit_code == 0, waits.output
    assert "round 2: is running" in waits.stdout
    assert "0 new tasks of writer, 10 are needed" in waits.stdout
    site.record_traces(10)
    site.finish()
    assert [row.stage for row in site.history()] == KINDS * 2
    promoted = site.out / "1" / "run" / "step-3"
    assert site.effects()[4:] == [
        *(f"2 step {step} from {promoted}" for step in (1, 2, 3)),
        f"2 evaluates step-3 against {promoted}",
    ]
    tasks = [json.loads(line)["question"] for name in ("train", "held-out")
             for line in (site.out / "2" / f"{name}.jsonl").read_text().splitlines()]  # fmt: skip
    assert sorted(tasks) == sorted(f"question {place}" for place in range(TRACES, TRACES + 10))


def test_improve_searches_from_the_configured_model_and_is_compared_with_the_promoted_one(site: Site) -> None:
    site.finish()
    site.use("improve")
    site.record_traces(TRACES)
    site.finish()
    assert site.effects()[4:] == [
        "2 improves smollm2-135m",
        f"2 evaluates smollm2-135m against {site.out / '1' / 'run' / 'step-3'}",
    ]


def test_the_loop_works_through_a_server_which_verifies_the_approval(site: Site) -> None:
    keys = Keys.from_file(site.folder / "lightning.key.secret")
    approver = site.folder / "ada.key"
    approver.write_text(keys.issue("approver", holder="ada"))
    site.approves = False
    with closing(open_store(str(site.path))) as store:
        app = create_app(store, keys=keys, engine=FakeEngine(lambda _: "old", model="old"))
        guard_promotions(app)
        thread = ServerThread(app)
        try:
            site.url = thread.start()
            for _ in range(6):
                assert site.call().exit_code == 0
                site.live()
            assert [row.stage for row in site.history()] == KINDS[:3]
            approved = call("deploy", "approve", "writer", "--store", site.url, "--key-file", approver)
            assert approved.exit_code == 0, approved.output
            site.finish()
        finally:
            thread.stop()
    assert [row.stage for row in site.history()] == KINDS


def test_a_loop_waits_for_a_server_that_is_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HttpStore.__init__.__kwdefaults__, "patience_s", 0.1)
    keys, reasons = Keys.from_file(site.folder / "lightning.key.secret"), []
    (site.folder / "loop.toml").write_text(CONFIG.replace("least = 10", "least = 100"))
    with closing(open_store(str(site.path))) as store:
        server = ServerThread(create_app(store, keys=keys))
        url = server.start()
        config = read_loop(site.folder / "loop.toml", "program:run", url, site.folder / "lightning.key")

        def sleep(_: float) -> None:
            nonlocal server
            reasons.append((site.out / record.STATUS_NAME).read_text())
            if len(reasons) == 1:
                server.stop()
            if len(reasons) == 2:
                server = ServerThread(create_app(store, keys=keys), port=int(url.rpartition(":")[2]))
                server.start()
            if len(reasons) == 3:
                raise KeyboardInterrupt

        try:
            with pytest.raises(SavedInterrupt):
                loop(config, site.out, LoopPace(sleep=sleep))
        finally:
            server.stop()
    assert "100 are needed" in reasons[0]
    assert "no answer from the server" in reasons[1]
    assert "100 are needed" in reasons[2]
    with pytest.raises(StoreError, match="no answer from the server"):
        loop(config, site.out, LoopPace(sleep=sleep))


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_that_is_killed_anywhere_ends_like_one_that_is_not(site: Site, method: str) -> None:
    site.use(method)
    site.finish()
    wanted, count = (rows_of(site), stages_of(site), site.effects()), site.events
    assert count > 11
    assert rows_of(site)[-1][1:3] == ["stable", rows_of(site)[0][3]]
    assert CANDIDATES[method].match(rows_of(site)[-1][2])
    for event in range(1, count + 1):
        site.reset()
        child = os.fork()
        if not child:
            site.events, site.killed_at = 0, event
            site.finish()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, event
        site.finish()
        assert (rows_of(site), stages_of(site), site.effects()) == wanted, event


def test_a_candidate_that_fails_in_the_shadow_is_rolled_back_once(site: Site) -> None:
    assert site.call().exit_code == 0
    last = site.history()[-1]
    with closing(open_store(str(site.path))) as store:
        store.add_calls(
            [replace(copy_of(place, last.number), error="no answer" if place < 5 else None) for place in range(20)]
        )
    child = os.fork()
    if not child:
        site.events, site.killed_at = 0, 2
        site.call()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [row.stage for row in site.history()] == ["candidate", "shadow", "rolled_back"]
    site.finish()
    assert len(site.history()) == 3
    said = "round 1: rolled back. it failed to answer 5 of 20 copies (round 1)"
    assert said in (site.out / record.STATUS_NAME).read_text()


def test_nothing_is_promoted_without_an_approval_and_the_loop_makes_none(site: Site) -> None:
    site.approves = False
    for _ in range(6):
        assert site.call().exit_code == 0
        site.live()
    assert [row.stage for row in site.history()] == ["candidate", "shadow", "canary"]
    assert "lightning-rl deploy approve writer --candidate writer@" in (site.out / record.STATUS_NAME).read_text()
    last = site.history()[-1]
    forged = replace(last, number=last.number + 1, details={"approval": "ada"})
    site.write(forged)
    told(site.call(), "needs a person's approval")
    assert site.history()[-1] == forged


def test_a_candidate_that_is_worse_ends_the_round_and_users_keep_the_stable_policy(site: Site) -> None:
    site.better = False
    site.finish()
    assert [row.stage for row in site.history()] == ["candidate", "shadow", "canary", "rolled_back"]
    assert "round 1: rolled back. the gate rejects it" in (site.out / record.STATUS_NAME).read_text()
    site.record_traces(12)
    site.quality = -0.1
    site.finish()
    assert len(site.history()) == 4, "what is worse on held-out tasks is not named"
    assert "evaluate.min_difference is +0.000" in (site.out / record.STATUS_NAME).read_text()


def test_a_rollback_by_hand_ends_the_round(site: Site) -> None:
    assert site.call().exit_code == 0
    site.write(roll_back(site.history(), "writer", Note("complaints", "ada")))
    site.finish()
    assert "round 1: rolled back. complaints" in (site.out / record.STATUS_NAME).read_text()


def test_only_traces_that_may_be_used_become_tasks(site: Site) -> None:
    with closing(open_store(str(site.path))) as store:
        store.add_calls([live_call(place, **make_terms(consent=False)) for place in range(50, 53)])
        store.add_calls([live_call(60, **make_terms(tenant="acme"))])
    found = json.loads(site.call("--dry-run", "--json").stdout)["select"]
    assert found["tasks"] + found["held_out"] == TRACES
    assert sorted(found["left_out"].values()) == [1, 3]


def test_options_of_a_round_that_goes_on_can_not_change(site: Site) -> None:
    assert site.call().exit_code == 0
    file = site.folder / "loop.toml"
    file.write_text(CONFIG.replace("steps = 3", "steps = 4"))
    told(site.call(), "can't be resumed", "train.steps = 3, not 4", "after this round")
    file.write_text(CONFIG)
    site.finish()
    file.write_text(CONFIG.replace("steps = 3", "steps = 4"))
    assert site.call().exit_code == 0, "a new round may have other options"


def test_a_round_that_can_not_learn_from_its_tasks_is_refused_before_it_selects_them(site: Site) -> None:
    file = site.folder / "loop.toml"
    site.use("improve")
    file.write_text(file.read_text().replace("least = 10", "least = 10\nheld_out = 0.4"))
    told(site.call("--dry-run"), "select.least is too small: improve needs 12 tasks")
    site.use("prompts")
    enough = file.read_text().replace("budget = 100", "budget = 22")
    file.write_text(enough.replace("budget = 22", "budget = 21"))
    for more in (("--dry-run",), ()):
        told(site.call(*more), "train.budget = 21 is too small for 12 tasks", "on 6 of them takes 22 rollouts")
    file.write_text(enough)
    assert site.call("--dry-run").exit_code == 0
    assert site.call().exit_code == 0, "the round has done nothing yet, so its options may change"


@pytest.mark.parametrize(
    ("method", "cost"),
    [
        ("improve", {"tokens": 1000}),
        ("prompts", {"rollouts": 100, "tokens": None}),
        ("model", {"rollouts": 0, "tokens": None}),
    ],
)
def test_every_method_states_its_cost_and_ends_the_round_if_it_finds_nothing(
    site: Site, method: str, cost: dict[str, Any]
) -> None:
    site.use(method)
    assert json.loads(site.call("--dry-run", "--json").stdout)["train"] == {"method": method, **cost}
    site.quality = -0.1
    site.finish()
    assert site.history() == []
    assert "round 1: rejected. " in (site.out / record.STATUS_NAME).read_text()


@pytest.mark.parametrize("method", ["train", "improve"])
def test_candidate_and_baseline_are_loaded_as_in_training(site: Site, method: str) -> None:
    loaded = {"chat_template": "hermes", "system_messages": "merge", "device": "cpu", "dtype": "float32",
              "max_model_len": 99, "tool_format": "hermes"}  # fmt: skip
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in loaded.items())
    site.use(method)
    file = site.folder / "loop.toml"
    file.write_text(file.read_text().replace("[train]\n", f"[train]\n{lines}"))
    assert site.call().exit_code == 0
    assert site.load == loaded


def test_a_dry_run_states_what_each_stage_takes_and_begins_nothing(site: Site) -> None:
    found = json.loads(site.call("--dry-run", "--json").stdout)
    assert found["select"] == {"tasks": 12, "held_out": 3, "least": 10, "left_out": {}}
    assert found["train"]["steps"] == 3
    assert found["evaluate"]["rollouts"] == 2 * 4 * 3
    shown = site.call("--dry-run").stdout
    assert "canary    about" in shown
    assert "lightning-rl train --dry-run" in shown
    site.use("prompts")
    assert "--dry-run" not in site.call("--dry-run").stdout, "no command forecasts the time of a search for prompts"
    assert not site.out.exists()


@pytest.mark.parametrize(
    ("old", "new", "say"),
    [
        ('base = "base"', "", "base is missing"),
        ("least = 10", "leats = 10", "unknown option 'select.leats'"),
        ("share = 0.5", "share = 5", "canary.share = 5"),
        ("steps = 3", 'steps = 3\ndata = "x"', "train.data: the loop sets this option"),
        ("steps = 3", 'steps = 3\ncheckpoint = "weights"', "can't be resumed"),
        ("steps = 3", "setps = 3", "unknown option 'setps'"),
        ("steps = 3", 'method = "magic"', "train.method = 'magic': give one of train, improve, prompts, model"),
        ("steps = 3", 'method = "improve"', "train.budget: give the tokens"),
        ("steps = 3", 'method = "improve"\nbudget = 9\nval_every = 2', "train.val_every: improve sets this"),
        (TRAIN, TABLES["prompts"].replace('reflect = "http://r/v1"', ""), "train.reflect is missing"),
        (TRAIN, TABLES["prompts"].replace("budget = 100", "bugdet = 100"), "bugdet"),
        (TRAIN, TABLES["model"].replace("against", "samples = 1 #"), "evaluate.against is missing"),
        ("share = 0.5", 'share = 0.5\nguards = { quick = 0.1 }', "quick"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_before_anything_begins(site: Site, old: str, new: str, say: str) -> None:
    (site.folder / "loop.toml").write_text(CONFIG.replace(old, new))
    told(site.call(), "loop.toml", say)
    assert not site.out.exists()


@pytest.mark.parametrize("name", ["OPENAI_BASE_URL", "train.model", "evaluate.against"])
def test_rollouts_do_not_call_the_production_server(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    site.use("prompts")
    site.url = "http://localhost:8000"
    if name.isupper():
        monkeypatch.setenv(name, "http://127.0.0.1:8000/v1")
    file, server = site.folder / "loop.toml", "old=http://127.0.0.1:8000/v1"
    text = file.read_text().replace("old=http://m/v1", server if name == "train.model" else "old=http://m/v1")
    file.write_text(f'{text}\n[evaluate]\nagainst = "{server}"\n' if name.startswith("evaluate") else text)
    told(site.call("--dry-run"), f"{name} is ", "http://127.0.0.1:8000/v1, the server in --store")


def test_a_folder_without_a_loop_has_no_status(tmp_path: Path) -> None:
    told(call("loop", "--status", "--out", tmp_path), "contains no loop")
    with pytest.raises(ConfigError, match="contains no loop"):
        record.describe_loop(tmp_path)
