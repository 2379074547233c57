"""The update: gradients are those of the published loss, however rows are packed; and nothing poisons the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.learn import head
from lightning_trainer.backends.torch.learn.activations import exceeds
from lightning_trainer.backends.torch.learn.tree import micro_batches
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.rl.rows import Row
from support.models.tiny import make_tiny_model
from support.models.updates import (
    distance,
    gradients,
    make_backend,
    make_batch,
    make_row,
    plain_gradients,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


@pytest.fixture
def backend(tiny_model: Path) -> Iterator[TorchLearner]:
    made = make_backend(tiny_model, learning_rate=1e-3)
    yield made
    made.close()


# Gradients.


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sharing_prefixes_does_not_change_the_gradient(tiny_model: Path, aggregation: str, temperature: float) -> None:
    rows = make_batch(temperature=temperature)
    ours, _ = gradients(tiny_model, rows, loss_aggregation=aggregation)
    assert distance(ours, plain_gradients(tiny_model, rows, aggregation)) < 1e-5
    assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-2


@pytest.mark.parametrize("tokens", [1, 40, 80, 110])
def test_micro_batching_does_not_change_the_gradient(tiny_model: Path, tokens: int) -> None:
    rows = make_batch()
    whole, metrics = gradients(tiny_model, rows)
    split, split_metrics = gradients(tiny_model, rows, micro_batch_tokens=tokens)
    assert distance(whole, split) < 1e-5
    for name in ("loss", "clip_fraction", "entropy", "logprob_gap", "tokens", "ratio_max"):
        assert split_metrics[name] == pytest.approx(metrics[name], abs=1e-5), name
    assert split_metrics["packed_tokens"] > metrics["packed_tokens"]


@pytest.mark.parametrize("rank", [0, 4])
def test_less_kept_for_the_backward_pass_changes_no_gradient(
    tiny_model: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_batch(count=60)
    with kept_bytes() as plain:
        whole, _ = gradients(tiny_model, rows, lora_rank=rank, micro_batch_tokens=4096)
    monkeypatch.setattr(head, "_PLACES", 16)
    monkeypatch.setattr(head, "_KEPT", 0)
    with kept_bytes() as saved:
        less, _ = gradients(tiny_model, rows, lora_rank=rank, micro_batch_tokens=4096, activation_checkpointing="on")
    assert distance(whole, less) < 1e-5
    assert sum(saved) < sum(plain) / 3


@contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Sizes of the tensors that are kept for the backward pass: each once, and no weights."""
    sizes: list[int] = []
    seen: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in seen and not tensor.is_leaf:
            seen.add(tensor.data_ptr())
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def test_activations_are_computed_again_only_where_they_do_not_fit() -> None:
    assert [exceeds(8 * 2**30, free) for free in (None, 12 * 2**30, 9 * 2**30)] == [False, False, True]


def test_merged_rows_give_the_gradient_of_unmerged_ones(tiny_model: Path) -> None:
    first = make_row([*range(10, 30)], slice(14, 18), 0.7)
    second = make_row([*range(10, 30), *range(60, 70)], slice(24, 28), -0.4)
    mask = first.mask.tolist() + [False] * 10
    merged = replace(
        second,
        mask=second.mask | np.array(mask),
        logprobs=second.logprobs + np.where(mask, -5, 0).astype(np.float32),
        advantages=second.advantages + np.where(mask, 0.7, 0.0),
        lengths=(4, 4),
    )
    one, _ = gradients(tiny_model, [merged], loss_aggregation="sequence-mean")
    two, _ = gradients(tiny_model, [first, second], loss_aggregation="sequence-mean")
    assert distance(one, two) < 1e-5


def test_masked_tokens_get_no_gradient(tiny_model: Path) -> None:
    row = make_row([*range(10, 40)], slice(20, 25))
    noise = np.where(row.mask, 0, 7.0)
    noisy = replace(row, advantages=row.advantages + noise, logprobs=row.logprobs + noise.astype(np.float32))
    expected = plain_gradients(tiny_model, [row])
    for variant in (row, noisy):
        ours, metrics = gradients(tiny_model, [variant])
        assert metrics["tokens"] == 5
        assert distance(ours, expected) < 1e-5
    cut, _ = gradients(tiny_model, [replace(row, **{k: getattr(row, k)[:25] for k in _ARRAYS})])
    assert distance(cut, expected) < 1e-5  # what comes after the last sampled token has no effect at all


_ARRAYS = ("tokens", "mask", "logprobs", "advantages")


def test_clipped_tokens_get_no_gradient(tiny_model: Path) -> None:
    row = make_row([*range(10, 30)], slice(10, 20), 1.0, logprob=-9.0)  # now far likelier than when it was sampled
    ours, metrics = gradients(tiny_model, [row])
    assert metrics["clip_fraction"] == 1.0
    assert max(float(gradient.abs().max()) for gradient in ours.values()) == 0.0
    free, _ = gradients(tiny_model, [row], clip_high=1e6)
    assert max(float(gradient.abs().max()) for gradient in free.values()) > 0.0


def test_rows_without_gradient_are_not_forwarded_but_count_in_the_mean(tiny_model: Path) -> None:
    rows = make_batch()
    idle = make_row([*range(100, 140)], slice(20, 40), 0.0)
    ours, metrics = gradients(tiny_model, [*rows, idle])
    assert metrics["tokens"] == sum(int(row.mask.sum()) for row in rows)
    assert distance(ours, plain_gradients(tiny_model, [*rows, idle])) < 1e-5


def test_a_batch_without_gradient_changes_nothing(backend: TorchLearner) -> None:
    before = {name: value.clone() for name, value in backend._weights_of().masters.items()}
    metrics = backend.update([make_row([*range(10, 30)], slice(10, 20), 0.0)])
    assert (metrics["tokens"], metrics["grad_norm"], metrics["skipped"]) == (0, 0, 0)
    assert all(torch.equal(before[name], value) for name, value in backend._weights_of().masters.items())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(3, 5), min_size=2, max_size=8), min_size=1, max_size=12),
    st.integers(1, 60),
    st.booleans(),
)
def test_packing_keeps_every_row_and_shares_every_beginning(sequences: list[list[int]], most: int, share: bool) -> None:
    rows = [make_row(tokens, slice(1, None), temperature=1.0 + n % 2) for n, tokens in enumerate(sequences)]
    seen = []
    for packed in micro_batches(rows, most, share=share):
        paths = iter(packed.segments)
        beginnings = {tuple(rows[r].tokens[: n + 1]) for r in packed.rows for n in range(len(rows[r].tokens))}
        total = sum(len(rows[r].tokens) for r in packed.rows)
        assert len(packed.tokens_N) == (len(beginnings) if share else total)
        assert len(packed.tokens_N) <= most or len(packed.rows) == 1
        for segment in paths:
            assert packed.positions_N[segment.path].tolist() == [*range(len(segment.path))]
            assert any(packed.tokens_N[segment.path].tolist() == sequences[r] for r in packed.rows)
        targets = np.concatenate([rows[r].tokens[1:] for r in packed.rows])
        sources = np.concatenate([rows[r].tokens[:-1] for r in packed.rows])
        temperatures = np.concatenate([np.full(len(rows[r].tokens) - 1, rows[r].temperature) for r in packed.rows])
        assert packed.target_P.tolist() == targets.tolist()
        assert packed.tokens_N[packed.predicts_U[packed.place_P]].tolist() == sources.tolist()
        assert packed.temperature_U[packed.place_P].tolist() == temperatures.tolist()
        seen += packed.rows.tolist()
    assert sorted(seen) == [*range(len(rows))]


# Steps.


def test_an_update_makes_good_answers_likelier_and_the_engine_knows(backend: TorchLearner) -> None:
    prompt = list(range(10, 30))
    good, bad = [40, 41, 42, 43], [50, 51, 52, 53]

    async def logprobs() -> tuple[float, ...]:
        pieces = backend.engine.generate(prompt, Sampling(max_tokens=6, temperature=0))
        return sum([piece.logprobs async for piece in pieces], ())

    def scores() -> list[float]:
        with torch.no_grad():
            backend._model.causal.set_attn_implementation("sdpa")
            logits = backend._model.causal(torch.tensor([prompt + good, prompt + bad])).logits[:, 19:-1]
            backend._model.causal.set_attn_implementation("lightning_plan")
        chosen = torch.tensor([good, bad])[..., None]
        return logits.log_softmax(-1).gather(-1, chosen).sum((1, 2)).tolist()

    before, engine_before = scores(), asyncio.run(logprobs())
    rows = [make_row(prompt + good, slice(20, 24), 1.0), make_row(prompt + bad, slice(20, 24), -1.0)]
    for _ in range(3):
        metrics = backend.update(rows)
    after = scores()
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5
    assert backend.engine.version == 3
    assert asyncio.run(logprobs()) != engine_before
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] > 0


def test_an_update_tells_what_it_saw_of_each_token(backend: TorchLearner) -> None:
    prompt = list(range(10, 30))
    rows = [make_row([*prompt, *own], slice(20, 24), value) for own, value in (([4] * 4, 1.0), ([5] * 4, -1.0))]
    flat = make_row([*prompt, 6, 7], slice(20, 22), 0.0)
    metrics = backend.update([*rows, flat])
    assert set(backend.seen) == set(rows)
    gap = np.concatenate([backend.seen[row].gap for row in rows]).astype(float)
    entropy = np.concatenate([backend.seen[row].entropy for row in rows]).astype(float)
    assert np.abs(gap).mean() == pytest.approx(metrics["logprob_gap"], rel=1e-3)
    assert entropy.mean() == pytest.approx(metrics["entropy"], rel=1e-3)
    own = backend.logprobs([rows[0]])[0]
    backend.update(rows)
    assert backend.seen[rows[0]].gap + rows[0].logprobs[rows[0].mask] == pytest.approx(own, abs=0.02)


def test_what_the_engine_recorded_is_what_the_trainer_computes(backend: TorchLearner) -> None:
    async def sample() -> Row:
        tokens, logprobs = [], []
        async for piece in backend.engine.generate(range(10, 40), Sampling(max_tokens=20, temperature=0.8, seed=4)):
            tokens += piece.token_ids
            logprobs += piece.logprobs
        row = make_row([*range(10, 40), *tokens], slice(30, None), temperature=0.8)
        row.logprobs[30:] = logprobs
        return row

    metrics = backend.update([asyncio.run(sample())])
    assert metrics["logprob_gap"] < 1e-5
    assert metrics["kl"] < 1e-6
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_recomputed_logprobs_replace_the_recorded_ones(tiny_model: Path) -> None:
    rows = make_batch()
    _, recorded = gradients(tiny_model, rows)
    _, recomputed = gradients(tiny_model, rows, old_logprobs="recompute")
    assert recorded["ratio_max"] > 1.2
    assert recomputed["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert recomputed["logprob_gap"] == pytest.approx(recorded["logprob_gap"], abs=1e-5)


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(backend: TorchLearner, advantage: float) -> None:
    backend.update(make_batch())
    before = {name: value.clone() for name, value in backend._weights_of().state().items()}
    metrics = backend.update([*make_batch(), make_row([*range(10, 30)], slice(10, 20), advantage)])
    assert metrics["skipped"] == 1
    assert all(torch.equal(before[name], value) for name, value in backend._weights_of().state().items())
    assert backend.update(make_batch())["skipped"] == 0


def test_small_steps_are_not_lost_in_bfloat16(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    backend = make_backend(folder, learning_rate=1e-7, dtype="bfloat16")
    masters = backend._weights_of().masters
    before = {name: value.clone() for name, value in masters.items()}
    for _ in range(2):
        backend.update(make_batch())
    changed = [float((value - before[name]).abs().max()) for name, value in masters.items()]
    assert min(changed) > 0
    assert all(parameter.dtype is torch.bfloat16 for parameter in backend._model.causal.parameters())
    backend.close()


def test_the_master_is_a_float32_gradient_sum_over_micro_batches(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    free = {"clip_low": 0.99, "clip_high": 1e6}  # a ratio at the clip's edge falls on either side by rounding
    whole, _ = gradients(folder, make_batch(), **free)
    split, _ = gradients(folder, make_batch(), micro_batch_tokens=40, **free)
    exact = plain_gradients(folder, make_batch(), **free)
    for ours in (whole, split):
        assert all(gradient.dtype is torch.float32 for gradient in ours.values())
        for name, gradient in ours.items():
            assert float((gradient - exact[name]).norm() / exact[name].norm()) < 0.1, name


# Reference policy and adapters.


@pytest.mark.parametrize("rank", [0, 4])
def test_kl_pulls_towards_the_starting_policy(tiny_model: Path, rank: int) -> None:
    def drift(kl_coef: float) -> list[float]:
        backend = make_backend(tiny_model, kl_coef=kl_coef, lora_rank=rank, learning_rate=3e-3, clip_high=1e3)
        found = [backend.update(make_batch(count=4))["kl"] for _ in range(6)]
        backend.close()
        return found

    light, heavy = drift(1e-6), drift(5.0)
    assert light[0] == pytest.approx(0.0, abs=1e-6)  # nothing is trained yet
    assert 0 < heavy[-1] < light[-1]


def test_only_adapters_are_trained_with_lora(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, lora_rank=2, lora_targets=("q_proj", "v_proj"), learning_rate=1e-2)
    before = {name: value.clone() for name, value in backend._model.causal.named_parameters()}
    for _ in range(2):
        metrics = backend.update(make_batch())
    changed = {n for n, value in backend._model.causal.named_parameters() if not torch.equal(before[n], value)}
    assert changed
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in changed)
    assert metrics["grad_norm"] > 0
    backend.close()


def test_unknown_lora_targets_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="lora_targets"):
        make_backend(tiny_model, lora_rank=2, lora_targets=("no_such_module",))
