"""Two agents that meet frozen weights of each other: whole runs of a tiny model."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_trainer import train
from lightning_trainer.kits.schedules.opponents import OpponentsKind
from lightning_trainer.run.state import read_state
from support.training.opponents import AGAINST, frozen_calls, largest_gap
from support.training.policies import calls, config, folder  # noqa: F401 - a fixture among them
from support.training.tiny_runs import lines


def policies_by_group(out: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for call in calls(out):
        if call.agent == "rewriter":
            found.setdefault(str(call.rollout_id).rpartition("-")[0].partition(":")[2], set()).add(str(call.policy))
    return found


def test_a_group_meets_one_opponent_with_the_weights_that_were_frozen(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, **AGAINST, steps=2))
    train(config(tiny_model, **{**AGAINST, "out": None}, steps=4, resume="out"))
    out = folder / "out"
    groups = policies_by_group(out)
    assert all(len(policies) == 1 for policies in groups.values())
    assert len(groups) == 16
    met = {group.partition(":")[2]: name for line in lines(out, "opponents") for group, name in line["groups"].items()}
    frozen = frozen_calls(out)
    assert {call.policy for call in frozen} == {"rewriter-past-0", "rewriter-past-1"}
    newest = {group for group, name in met.items() if name == "rewriter@newest"}
    assert {group for group, policies in groups.items() if policies == {"rewriter"}} == newest
    for call in frozen:
        group = str(call.rollout_id).rpartition("-")[0].partition(":")[2]
        assert met[group] == f"rewriter@{call.policy_version}"
    assert largest_gap(tiny_model, out) < 1e-4
    for line in lines(out):
        assert line["calls_trained"] == 24 - line.get("calls_dropped/of_the_frozen_weights_of_an_opponent", 0)
        assert any(name.startswith("reward_against/rewriter@") for name in line)
    kept = read_state((out / "checkpoint").resolve()).kept["opponents"]
    assert kept["rewriter"]["frozen"] > len(kept["rewriter"]["versions"]) == 2
    assert not list((out / "checkpoint").glob("*past*"))


def test_a_resumed_run_meets_the_opponents_of_a_whole_one(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, **AGAINST, steps=4))
    train(config(tiny_model, **{**AGAINST, "out": "halves"}, steps=2))
    train(config(tiny_model, **{**AGAINST, "out": None}, steps=4, resume="halves"))
    whole, halves = (
        [list(line["groups"].values()) for line in lines(folder / out, "opponents")] for out in ("out", "halves")
    )
    assert whole == halves
    assert len({name for names in whole for name in names}) > 2


def test_with_turns_only_the_agents_that_have_none_are_opponents(tiny_model: Path, folder: Path) -> None:
    (folder / "val.jsonl").write_text('{"q": "ask"}\n')
    turns = {"schedule": "alternate:1", "val": "val.jsonl", "val_every": 1, "opponents_every": None}
    train(config(tiny_model, **{**AGAINST, **turns, "opponents": "writer=2,rewriter=2"}, steps=4))
    for line, opponent in zip(lines(folder / "out", "opponents"), ("rewriter", "writer") * 2, strict=True):
        assert {name.partition("@")[0] for name in line["groups"].values()} == {opponent}
    for line, turn in zip(lines(folder / "out"), ("writer", "rewriter") * 2, strict=True):
        assert (line[f"turn/{turn}"], line["calls_trained"]) == (1.0, 12.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opponents": "rewriter=0"}, "keep at least 1"),
        ({"opponents": "editor=2"}, "names editor, which policies does not"),
        ({"opponents": "checker=2"}, "whose policy is not trained"),
        ({"policies": "rewriter=lora,checker=base"}, "no other agent that learns"),
        ({"staleness": 1}, "staleness samples ahead"),
        ({"credit": "counterfactual"}, "against other opponents"),
        ({"policies": "rewriter=lora,writer=lora:rewriter-past-1,checker=base"}, "rewriter-past-1 is used"),
        ({"opponents": "rewriter"}, "is not AGENT=K"),
    ],
)
def test_what_has_no_population_is_refused(folder: Path, tiny_model: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OpponentsKind().check(config(tiny_model, **{**AGAINST, **options}))


def test_a_run_without_policies_says_which_policy_an_opponent_needs(folder: Path, tiny_model: Path) -> None:
    options = {**AGAINST, "policies": {}, "agents": "writer,rewriter"}
    with pytest.raises(ConfigError, match=r"names rewriter, which policies does not.*--policy rewriter=lora"):
        train(config(tiny_model, **options, steps=1))
