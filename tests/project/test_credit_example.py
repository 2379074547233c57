"""The comparison of credit at equal tokens: what it counts, and that its options are those of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import credit

from lightning_trainer import TrainConfig

LINES: list[dict[str, Any]] = [
    {"kind": "val", "step": 0, "reward": 0.1},
    {"kind": "train", "step": 0, "tokens_prompt": 10, "tokens_generated": 5, "fork_tokens_replayed": 99},
    {"kind": "train", "step": 1, "tokens_prompt": 10, "fork_tokens_prompt": 3, "fork_tokens_generated": 2},
    {"kind": "val", "step": 2, "reward": 0.3},
]


@pytest.fixture
def run(tmp_path: Path) -> credit.Run:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return credit.read(tmp_path, "trees", 0)


def test_what_forks_read_and_drew_counts_and_what_a_record_gave_does_not(run: credit.Run) -> None:
    assert (run.steps, run.curve) == (2, [(0, 0.1), (30, 0.3)])


def test_setups_are_compared_at_equal_tokens(run: credit.Run) -> None:
    other = credit.Run(setup="groups", seed=0, steps=1, curve=[(0, 0.1), (10, 0.2)])
    assert (run.at(15), run.at(31)) == (pytest.approx(0.2), None)
    assert credit.Run(setup="nothing to learn", seed=0, steps=1, curve=[(0, 0.1)]).at(0) == 0.1
    trees, groups = credit.table([run, other], 20).splitlines()[2:]
    assert trees.endswith("| 0.133 | 0.167 | 0.233 |")
    assert groups.endswith("| 0.150 | 0.200 |  |")  # it ended before


@pytest.mark.parametrize("quick", [False, True])
def test_each_setup_has_options_of_a_run(tmp_path: Path, quick: bool) -> None:
    comparison = credit.Comparison("text_to_sql", tmp_path, quick=quick)
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "?", "query": "SELECT 1"}\n')
    found = []
    for setup in comparison.setups:
        options = {name.replace("-", "_"): value for name, value in comparison.options(setup).items()}
        policies = options.pop("policy")
        found.append(TrainConfig(**options, policies=policies, data=data, val=data, steps=1))
    assert [config.uses_forks for config in found] == [False, True]


def test_a_run_goes_on_from_its_newest_checkpoint_until_its_tokens_are_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = credit.Comparison("text_to_sql", tmp_path, quick=False)
    comparison.tokens = 100
    comparison.setups = {"grpo": {}}
    (tmp_path / "data").mkdir()
    asked = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        folder, steps = tmp_path / "grpo-0", int(command[command.index("--steps") + 1])
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        lines = [{"kind": "train", "step": step, "tokens_prompt": 20} for step in range(steps)]
        lines += [{"kind": "val", "step": step, "reward": 0.5} for step in (0, steps)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(credit.subprocess, "run", run)
    assert [each.steps for each in comparison.run([0])] == [5]
    assert asked[0][:3] == ["lightning-rl", "train", "agent:run_team"]
    assert [("--resume" in command, command[command.index("--steps") + 1]) for command in asked] == [
        (False, "2"),
        (True, "5"),
    ]
    assert [each.steps for each in comparison.run([0])] == [5]
    assert len(asked) == 2  # nothing is left to do
