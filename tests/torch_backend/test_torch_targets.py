"""A teacher's targets: the divergence and its gradient are the formula's, whatever is packed with what."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.rl.losses import candidate_divergence
from lightning_trainer.rl.rows import Row, token_weights
from lightning_trainer.rl.targets import Target
from support.models.updates import distance, gradients, make_backend, make_batch, make_row, plain_gradients

pytestmark = pytest.mark.torch
VOCABULARY = 259


def formula(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the divergence of whole distributions (V,), written down term by term."""
    if kind == "reverse":
        return sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))
    if kind == "forward":
        return sum(b * torch.log(b / a) for a, b in zip(p, q, strict=True))
    m = (p + q) / 2
    return sum(a * torch.log(a / c) / 2 + b * torch.log(b / c) / 2 for a, b, c in zip(p, q, m, strict=True))


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen-shannon"])
def test_over_all_tokens_it_is_the_divergence_and_over_some_the_rest_is_one_token_more(kind: str) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 9).double().softmax(-1)
    whole = candidate_divergence(p.log()[None], q.log()[None], kind)
    assert float(whole) == pytest.approx(float(formula(p, q, kind)), abs=1e-5)
    few = candidate_divergence(p.log()[None, :4], q.log()[None, :4], kind)
    lumped = [torch.cat([each[:4], each[4:].sum()[None]]) for each in (p, q)]
    assert float(few) == pytest.approx(float(formula(*lumped, kind)), abs=1e-5)
    assert 0 < float(few) < float(whole)


def test_a_token_that_either_rules_out_leaves_a_finite_divergence_and_gradient() -> None:
    own = torch.tensor([[0.0, -math.inf, -1.0]]).log_softmax(-1)[:, :2].clone().requires_grad_()
    divergence = candidate_divergence(own, torch.tensor([[-math.inf, -0.1]]))
    divergence.sum().backward()
    assert torch.isfinite(divergence).all()
    assert torch.isfinite(own.grad).all()


def test_an_unknown_divergence_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="Use reverse, forward"):
        candidate_divergence(torch.zeros(1, 1), torch.zeros(1, 1), "backward")
    with pytest.raises(ConfigError, match="divergence must be one of reverse"):
        make_backend(tiny_model, divergence="backward")


def taught(rows: list[Row], count: int) -> list[Row]:
    """Give rows targets over tokens drawn at random; the first token of each is not taught, and one row in four."""
    random = np.random.default_rng(3)
    found = []
    for n, row in enumerate(rows):
        size = int(row.mask.sum())
        ids = np.stack([random.permutation(VOCABULARY)[:count] for _ in range(size)])
        logits = random.normal(size=(size, VOCABULARY))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        target = Target(
            ids,
            np.take_along_axis(logprobs, ids, axis=1).astype(np.float32),
            np.where(np.arange(size) > 0, 0.7, 0.0).astype(np.float32),
        )
        found.append(row if n % 4 == 2 else replace(row, target=target))
    return found


def plain_with_targets(folder: Path, rows: list[Row], kind: str) -> dict[str, torch.Tensor]:
    """The policy's gradient, and that of the formula, by transformers and autograd alone."""
    from transformers import AutoModelForCausalLM

    found = plain_gradients(folder, rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, weights in zip(rows, token_weights(rows, "token-mean"), strict=True):
        if row.target is None:
            continue
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        all_p = (logits[torch.from_numpy(row.mask[1:])] / row.temperature).softmax(-1)
        for k, own in enumerate(row.target.weights_K):
            p, q = all_p[k][row.target.tokens_KC[k]], torch.from_numpy(row.target.logprobs_KC[k]).exp()
            if len(p) < VOCABULARY:
                p, q = (torch.cat([each, 1 - each.sum()[None]]) for each in (p, q))
            (float(weights[k] * own) * formula(p, q, kind)).backward(retain_graph=True)
    return {name: gradient + dict(model.named_parameters())[name].grad for name, gradient in found.items()}


@pytest.mark.parametrize(
    ("kind", "count", "temperature"),
    [("reverse", 7, 0.7), ("reverse", VOCABULARY, 1.0), ("forward", 7, 1.0), ("jensen-shannon", 7, 1.0)],
)
def test_the_gradient_is_that_of_the_formula(tiny_model: Path, kind: str, count: int, temperature: float) -> None:
    rows = taught(make_batch(count=6, temperature=temperature), count)
    ours, told = gradients(tiny_model, rows, divergence=kind, micro_batch_tokens=60)
    plain = plain_with_targets(tiny_model, rows, kind)
    assert distance(ours, plain) < 1e-5
    assert distance(ours, plain_gradients(tiny_model, rows)) > 1e-4
    weights = [row.target.weights_K for row in rows if row.target is not None]
    assert told["taught_tokens"] == sum((own > 0).sum() for own in weights)
    assert told["teacher_kl"] > 0


def test_a_row_that_only_a_target_teaches_is_learned_and_one_without_either_is_not_forwarded(tiny_model: Path) -> None:
    still = [replace(row, advantages=np.zeros(len(row.tokens))) for row in make_batch(count=6)]
    rows = taught(still, 5)
    assert [row.has_gradient for row in rows] == [row.target is not None for row in rows]
    ours, told = gradients(tiny_model, rows)
    assert distance(ours, plain_with_targets(tiny_model, rows, "reverse")) < 1e-5
    assert told["tokens"] == sum(sum(row.lengths) for row in rows if row.target is not None)


def test_candidates_are_the_models_likeliest_and_are_as_likely_as_transformers_says(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows, backend = make_batch(temperature=0.7), make_backend(tiny_model, micro_batch_tokens=60)
    ids = backend.likeliest(rows, 6)
    logprobs = backend.logprobs(rows, ids)
    assert backend.likeliest(rows[:1], 10_000)[0].shape == (sum(rows[0].lengths), VOCABULARY)
    backend.close()
    for row, own, found in zip(rows, ids, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        best = (logits[torch.from_numpy(row.mask[1:])] / row.temperature).log_softmax(-1).topk(6)
        assert own.tolist() == best.indices.tolist()
        assert found == pytest.approx(best.values.numpy(), abs=1e-4)


def test_a_target_has_a_line_for_each_trained_token() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        Target(np.zeros((2, 3), np.int64), np.zeros((2, 2), np.float32), np.zeros(2, np.float32))
    assert not make_row([5, 6, 7], slice(1, None), 0.0).has_gradient


# The weights of a policy that is its own teacher.


def plain_logprobs(folder: Path, rows: list[Row], weights: dict[str, torch.Tensor] | None = None) -> list[np.ndarray]:
    """Return log-probabilities of trained tokens by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights or {}, strict=False)
    found = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(row.mask[1:])].numpy())
    return found


def furthest(these: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(these, others, strict=True))


def test_a_teacher_with_averaged_weights_is_the_average_of_all_steps_and_is_resumed(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = {"teacher_weights": "ema", "ema_decay": 0.75, "learning_rate": 1e-2}
    learner, rows = make_backend(tiny_model, **options), make_batch()
    masters = learner._weights_of().masters
    average = {name: master.detach().clone() for name, master in masters.items()}
    for _ in range(3):
        learner.update(rows)
        average = {name: 0.75 * old + 0.25 * masters[name].detach() for name, old in average.items()}
    expected, newest = plain_logprobs(tiny_model, rows, average), learner.logprobs(rows)
    assert furthest(learner.teacher_logprobs(rows), expected) < 1e-4
    assert furthest(newest, expected) > 1e-2  # it is another model
    assert furthest(newest, learner.logprobs(rows)) == 0.0  # and the policy is what it was
    learner.save(tmp_path / "kept")
    resumed = make_backend(tiny_model, **options)
    resumed.load(tmp_path / "kept")
    assert furthest(learner.teacher_logprobs(rows), resumed.teacher_logprobs(rows)) == 0.0
    learner.close()
    resumed.close()


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}, {"lora_rank": 4, "adapters": ("writer",)}])
def test_a_teacher_with_the_first_weights_stays_what_it_was(tiny_model: Path, lora: dict[str, object]) -> None:
    learner = make_backend(tiny_model, teacher_weights="base", learning_rate=1e-2, **lora)
    rows = [replace(row, policy="writer" if "adapters" in lora else row.policy) for row in make_batch()]
    expected = plain_logprobs(tiny_model, rows)
    for _ in range(2):
        learner.update(rows)
    assert furthest(learner.teacher_logprobs(rows), expected) < 1e-4
    assert furthest(learner.logprobs(rows), expected) > 1e-3
    learner.close()


@pytest.mark.parametrize("named", [(), ("writer", "checker")])
def test_a_run_from_trained_adapters_starts_from_those(
    tiny_model: Path, tmp_path: Path, named: tuple[str, ...]
) -> None:
    """The teacher and the reference are these adapters, not the model without them; a new adapter starts as that."""
    rows = [replace(row, policy=named[n % 2] if named else row.policy) for n, row in enumerate(make_batch())]
    options = {"lora_rank": 4, "learning_rate": 1e-2, "kl_coef": 0.1, "kl_estimator": "k1"}
    first = make_backend(tiny_model, adapters=named[:1], **options)
    for _ in range(2):
        first.update(rows[::2])
    first.save(tmp_path / "first", resumable=False)
    first.close()
    learner = make_backend(tmp_path / "first", adapters=named, teacher_weights="base", **options)
    start = learner.logprobs(rows)
    assert furthest(start, plain_logprobs(tiny_model, rows)) > 1e-3
    assert learner.update(rows)["kl"] == pytest.approx(0.0, abs=1e-6)
    newest = learner.logprobs(rows)
    assert furthest(newest, start) > 1e-3
    assert furthest(learner.teacher_logprobs(rows), start) < 1e-5
    for row, own, penalty in zip(rows, start, learner.penalties(rows), strict=True):
        assert penalty == pytest.approx(0.1 * (row.logprobs[row.mask] - own), abs=1e-5)
    assert furthest(learner.logprobs(rows), newest) == 0.0  # the policy is what it was
    learner.close()


def test_averages_of_several_adapters_are_their_own(tiny_model: Path) -> None:
    options = {"lora_rank": 4, "adapters": ("writer", "checker"), "learning_rate": 1e-2}
    learner = make_backend(tiny_model, teacher_weights="ema", ema_decay=0.5, **options)
    rows = [replace(row, policy=("writer", "checker")[n % 2]) for n, row in enumerate(make_batch())]
    first = learner.logprobs(rows)
    learner.update(rows[::2])
    found = learner.teacher_logprobs(rows)
    assert furthest(found[1::2], first[1::2]) == 0.0  # the checker has learned nothing
    assert furthest(found[::2], first[::2]) > 1e-4
    assert furthest(found[::2], learner.logprobs(rows[::2])) > 1e-4
    learner.close()


def test_unknown_weights_of_a_teacher_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="teacher_weights must be one of newest, base, ema"):
        make_backend(tiny_model, teacher_weights="oldest")
