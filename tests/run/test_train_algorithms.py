"""Whole runs of the tiny model with other algorithms than GRPO, and with automatic rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans import hooks
from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_trainer import train
from lightning_trainer.cli import cli
from lightning_trainer.rl.rewards.judge import PLUGIN
from support.training.programs import folder_with
from support.training.tiny_runs import PROGRAMS, config, lines

folder = folder_with(5, **PROGRAMS)


def shown(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ppo_learns_values_and_goes_on_with_them(folder: Path, tiny_model: Path) -> None:
    options = {"algorithm": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01, "value_learning_rate": 0.05, "save_every": 1}
    train(config(tiny_model, **options, steps=2))
    first, second = lines(folder / "out")
    assert (first["value_mean"], first["kl"]) == (0.0, pytest.approx(0.0, abs=1e-6))
    assert second["value_mean"] != 0.0
    assert second["kl"] > 0.0
    result = train(config(tiny_model, **options, steps=3, out=None, resume="out"))
    assert result.steps == 3
    assert lines(folder / "out")[2]["value_mean"] != 0.0


def test_automatic_rewards_are_kept_with_their_source_and_shown(folder: Path, tiny_model: Path) -> None:
    rewards = {
        "answer_format": {"weight": 0.5, "pattern": "^[a-zA-Z]"},
        "overlong": {"weight": 1, "max_tokens": 5, "buffer": 2},
    }
    train(config(tiny_model, algorithm="reinforce++", kl_coef=0.1, rewards=rewards, steps=2))
    for line in lines(folder / "out"):
        assert -0.5 <= line["reward_source/answer_format"] <= 0.5
        assert -1.0 <= line["reward_source/overlong"] <= 0.0
        assert line["reward"] == pytest.approx(line["reward_source/run"])  # the program's own
    store = open_store(str(folder / "out" / "lightning.db"))
    kept = [reward for reward in store.rewards() if reward.source == "answer_format"]
    store.close()
    assert len(kept) == 16
    (writer,) = shown("agents", "--store", "out/lightning.db")
    assert set(writer["reward_sources"]) == {"run", "answer_format", "overlong"}
    chats = [line for line in shown("traces", "--store", "out/lightning.db") if line["operation"] == "chat"]
    assert all({r["source"] for r in line["rewards"]} >= {"answer_format", "overlong"} for line in chats)
    report = shown("blame", "out")[-1]["account"]
    assert set(report["given"]) == {"run", "answer_format", "overlong"}
    assert report["credited"] == pytest.approx(report["rewards"])  # one call each
    assert hooks.manager().get_plugin(PLUGIN) is None


def test_dapo_replaces_groups_without_contrast(folder: Path, tiny_model: Path) -> None:
    train(config(tiny_model, algorithm="dapo", group_size=2, batch_size=3, steps=3))
    found = lines(folder / "out")
    assert any(line["rollouts"] > 6 for line in found)
    for line in found:
        replaced = line.get("calls_dropped/group_replaced", 0)
        assert line["calls_seen"] == line["rollouts"] == line["calls_trained"] + replaced
    assert all(line["rows_without_gradient"] == 0 for line in found if line["calls_trained"])


def test_wrong_rules_stop_a_run_before_it_begins(folder: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown rule"):
        train(config(tiny_model, rewards={"tool_state": 1.0}))
    assert not (folder / "out").exists()
