"""Several updates of a batch, warm-up, and the correction for the gap between engine and trainer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import backend
from lightning_trainer.backends.torch.learn.update import minibatches
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.backends.verl.options import overrides
from lightning_trainer.config.train import TrainConfig
from support.models.losses import options_of, recorded
from support.models.updates import make_backend

pytestmark = pytest.mark.torch


def rows(backend):
    return [recorded(backend, [5, 6, 7 + n], 1.0 if n % 2 else -1.0) for n in range(4)]


def test_clip_does_nothing_in_one_step_and_bites_in_the_second_pass(tiny_model: Path) -> None:
    given = {"learning_rate": 1e-2, "clip_low": 1e-3, "clip_high": 1e-3, "old_logprobs": "recompute"}
    once = make_backend(tiny_model, **given)
    found = once.update(rows(once))
    assert (found["clip_fraction"], found["ratio_max"]) == (0.0, pytest.approx(1.0, abs=1e-5))
    twice = make_backend(tiny_model, update_epochs=2, **given)
    found = twice.update(rows(twice))
    assert found["clip_fraction"] > 0.2
    assert found["ratio_max"] > 1.001
    once.close()
    twice.close()


def test_minibatches_take_a_step_each_and_see_every_row_once(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, minibatches=2, learning_rate=1e-3)
    backend.update(rows(backend))
    assert backend._weights_of().steps == 2
    options = make_options(tiny_model, {"minibatches": 3})
    given = rows(backend)
    pieces = minibatches(given, options, 0)
    assert sorted(id(row) for piece in pieces for row in piece) == sorted(id(row) for row in given)
    drawn = [[list(map(id, piece)) for piece in minibatches(given, options, step)] for step in range(8)]
    assert any(other != drawn[0] for other in drawn)
    assert drawn[0] == [list(map(id, piece)) for piece in minibatches(given, options, 0)]
    backend.close()


def test_learning_rate_rises_and_goes_on_from_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    given = {"warmup_steps": 4, "learning_rate": 1e-3}
    backend = make_backend(tiny_model, **given)
    found = []
    for step in range(5):
        if step == 2:
            (tmp_path / "c").mkdir()
            backend.save(tmp_path / "c")
            backend.close()
            backend = make_backend(tiny_model, **given)
            backend.load(tmp_path / "c")
        backend.update(rows(backend))
        found.append(float(backend._weights_of().optimiser.param_groups[0]["lr"]))
    assert found == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    backend.close()


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_learning_rate_rises_and_falls_to_where_it_is_to_end(tiny_model: Path, tmp_path: Path, name: str) -> None:
    given = {"lr_schedule": name, "warmup_steps": 2, "min_lr_ratio": 0.1, "total_steps": 10, "learning_rate": 1e-3}
    backend = make_backend(tiny_model, **given)
    batch, found = rows(backend), []
    for step in range(10):
        if step == 4:
            backend.save(tmp_path / "c")
            backend.close()
            backend = make_backend(tiny_model, **given)
            backend.load(tmp_path / "c")
        backend.update(batch)
        found.append(float(backend._weights_of().optimiser.param_groups[0]["lr"]))
    backend.close()
    passed = [step / 8 for step in range(8)]
    share = passed if name == "linear" else [(1 - math.cos(math.pi * part)) / 2 for part in passed]
    assert found == pytest.approx([0.5e-3, 1e-3, *(1e-3 * (1 - 0.9 * part) for part in share)])


def test_a_run_says_where_its_schedule_ends(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"x": 1}\n' * 24)
    config = TrainConfig(
        target="a:b", data=data, model="m", lr_schedule="cosine", epochs=2, batch_size=8, update_epochs=2, minibatches=3
    )  # fmt: skip
    assert backend.learner_options(config)["total_steps"] == 6 * 2 * 3
    turns = {"policies": "writer=lora,checker=lora,judge=fixed", "schedule": "alternate:2"}
    assert backend.learner_options(config.with_values(**turns))["total_steps"] == 4 * 2 * 3  # 2, 2 of the other, 2


def shifted(row, gap: float):
    """The same row, had the engine given its tokens so much less log-probability than the trainer."""
    return replace(row, logprobs=np.where(row.mask, row.logprobs - gap, 0.0).astype(np.float32))


@pytest.mark.parametrize(("gap", "weight"), [(-0.5, math.exp(-0.5)), (0.5, math.exp(0.5)), (3.0, 2.0)])
def test_tokens_weigh_the_trainers_probability_over_the_engines_up_to_a_cap(
    tiny_model: Path, gap: float, weight: float
) -> None:
    plain = make_backend(tiny_model, old_logprobs="recompute", max_grad_norm=1e9)
    given = [shifted(row, gap) for row in rows(plain)[:1]]
    norm = plain.update(given)["grad_norm"]
    plain.close()
    capped = make_backend(tiny_model, old_logprobs="recompute", importance_cap=2.0, max_grad_norm=1e9)
    assert capped.update(given)["grad_norm"] == pytest.approx(weight * norm, rel=1e-2)
    capped.close()


def test_tokens_that_engine_and_trainer_see_too_differently_are_left_out(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, old_logprobs="recompute", importance_mask=2.0)
    assert backend.update([shifted(row, 1.0) for row in rows(backend)])["grad_norm"] == 0.0
    assert backend.update([shifted(row, 0.5) for row in rows(backend)])["grad_norm"] > 0.0
    backend.close()


def test_gspo_compares_the_trainers_own_log_probabilities_unless_told_otherwise() -> None:
    assert options_of("gspo")["old_logprobs"] == "recompute"
    assert "old_logprobs" not in options_of("grpo")
    assert options_of("gspo", old_logprobs="engine")["old_logprobs"] == "engine"


def checked(**options: Any) -> None:
    config = TrainConfig(target="a:b", data="d.jsonl", model="m", **options)
    (overrides.check if config.backend == "verl" else backend.check)(config)


@pytest.mark.parametrize(
    "options",
    [
        {"importance_cap": 2.0},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
        {"backend": "verl", "update_epochs": 2},
        {"backend": "verl", "old_logprobs": "engine"},
        {"backend": "verl", "lr_schedule": "linear"},
        {"min_lr_ratio": 0.1},
        {"lr_schedule": "cosine", "steps": 4, "warmup_steps": 4},
    ],
)
def test_what_would_do_nothing_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        checked(**options)
