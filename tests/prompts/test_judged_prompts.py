"""A judge compares rollouts of a group, and a search for prompts has none: it is refused, and never a reward of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gepa")

from lightning_spans.errors import ConfigError
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.prompts.optimise import optimise
from lightning_trainer.kits.prompts.options import PromptsConfig
from lightning_trainer.session.answers import Endpoint

AT = Endpoint("http://127.0.0.1:9/v1", "big")


def test_a_search_for_prompts_has_no_judge(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": tmp_path / "t.jsonl", "agents": ("a",), "reflect": AT, "budget": 99}
    with pytest.raises(ConfigError, match="a judge ranks"):
        optimise(PromptsConfig(**given, out=tmp_path / "p.json", target="app:run", reward="judge"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reward", [None, "judge"])
def test_a_choice_between_methods_has_no_judge(reward: str | None) -> None:
    table = {"endpoint": "http://h/v1", "model": "j"}
    train = TrainConfig(target="a:run", data="d.jsonl", val="v.jsonl", model="m", judge=table, reward=reward)
    with pytest.raises(ConfigError, match="a judge ranks"):
        ImproveConfig(train=train, budget=512, methods=("prompts",), reflect=AT).check()
