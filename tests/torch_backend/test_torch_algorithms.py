"""Every algorithm on the torch backend: good answers become likelier, and each term of the loss has its gradient."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.registry import registrations
from lightning_trainer.rl.algorithms.ppo import token_advantages
from lightning_trainer.rl.losses import cispo_loss, entropy, gspo_loss, token_logprobs
from lightning_trainer.rl.rows import Row, token_weights
from support.models.losses import BAD, GOOD, PROMPT, options_of, recorded
from support.models.updates import Gradients, distance, gradients, make_backend, make_batch, make_row

pytestmark = pytest.mark.torch


def logprobs(backend, tokens: list[int]) -> float:
    """Log-probability of an answer under the weights in force."""
    row = make_row(PROMPT + tokens, slice(20, 24), 0.0)
    with torch.no_grad():
        from lightning_trainer.backends.torch.learn.tree import micro_batches
        from lightning_trainer.backends.torch.learn.update import token_logprobs as forward

        (packed,) = micro_batches([row], 100)
        return float(forward(backend._model, packed)[0].sum())


@pytest.mark.parametrize("algorithm", sorted(registrations("algorithm").keys() - {"likelihood", "distil"}))
def test_good_answers_become_likelier_and_bad_ones_rarer(tiny_model: Path, algorithm: str) -> None:
    given = options_of(algorithm, learning_rate=3e-3)
    backend = make_backend(tiny_model, **{name: value for name, value in given.items() if name not in ("model",)})
    before = logprobs(backend, GOOD), logprobs(backend, BAD)
    for _ in range(4):  # credit 1 and 0 for ppo, whose value head makes the rest
        worst = 0.0 if algorithm == "ppo" else -1.0
        metrics = backend.update([recorded(backend, GOOD, 1.0), recorded(backend, BAD, worst)])
    assert metrics["skipped"] == 0
    assert logprobs(backend, GOOD) > before[0] + 0.5
    assert logprobs(backend, BAD) < before[1] - 0.5
    backend.close()


def plain(folder: Path, rows: list[Row], term) -> Gradients:
    """Gradients by transformers alone, each row forwarded whole: `term` gives a row's part of the loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, (row, weights) in enumerate(zip(rows, token_weights(rows, "token-mean"), strict=True)):
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1][
            torch.from_numpy(row.mask[1:])
        ]
        term(number, row, logits, torch.from_numpy(weights)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def now(row: Row, logits):
    return token_logprobs(logits, torch.from_numpy(row.tokens[row.mask]), row.temperature)


def given_to(row: Row):
    return torch.from_numpy(row.logprobs[row.mask]), torch.from_numpy(row.advantages[row.mask])


@pytest.mark.parametrize("tokens", [40, 2048])
def test_gspo_has_one_ratio_for_each_response(tiny_model: Path, tokens: int) -> None:
    rows = make_batch()
    clip = {"clip_low": 0.2, "clip_high": 0.3}

    def term(number, row, logits, weights):
        return gspo_loss(now(row, logits), *given_to(row), weights, torch.zeros(len(weights)), **clip).loss

    ours, metrics = gradients(tiny_model, rows, algorithm="gspo", micro_batch_tokens=tokens, **clip)
    assert 0 < metrics["clip_fraction"] < 1
    assert distance(ours, plain(tiny_model, rows, term)) < 1e-5


def test_cispo_keeps_the_gradient_of_clipped_tokens(tiny_model: Path) -> None:
    rows = make_batch()

    def term(number, row, logits, weights):
        return cispo_loss(now(row, logits), *given_to(row), weights, clip_low=1.0, clip_high=0.3).loss

    ours, _ = gradients(tiny_model, rows, algorithm="cispo", clip_low=1.0, clip_high=0.3)
    assert distance(ours, plain(tiny_model, rows, term)) < 1e-5


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(tiny_model: Path) -> None:
    rows = [replace(row, advantages=row.advantages * 0) for row in make_batch(temperature=0.7)]

    def term(number, row, logits, weights):
        return -0.5 * (weights * entropy(logits, row.temperature)).sum()

    ours, metrics = gradients(tiny_model, rows, entropy_coef=0.5)
    assert metrics["tokens"] > 0  # rows without advantage learn all the same
    assert metrics["loss"] == 0.0  # of the policy alone
    assert distance(ours, plain(tiny_model, rows, term)) < 1e-5


def test_entropy_goes_up_with_its_bonus(tiny_model: Path) -> None:
    rows = [replace(row, advantages=row.advantages * 0) for row in make_batch()]
    backend = make_backend(tiny_model, entropy_coef=1.0, learning_rate=3e-3)
    entropies = [backend.update(rows)["entropy"] for _ in range(4)]
    backend.close()
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.1


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k1+"])
def test_each_estimator_pulls_towards_the_starting_policy(tiny_model: Path, estimator: str) -> None:
    def drift(kl_coef: float) -> float:
        options = {"kl_coef": kl_coef, "kl_estimator": estimator, "learning_rate": 3e-3, "clip_high": 1e3}
        backend = make_backend(tiny_model, **options)
        before = [float(value) for value in (logprobs(backend, GOOD), logprobs(backend, BAD))]
        for _ in range(4):
            backend.update([recorded(backend, GOOD, 1.0), recorded(backend, BAD, -1.0)])
        after = [logprobs(backend, GOOD), logprobs(backend, BAD)]
        backend.close()
        return sum(abs(now - then) for now, then in zip(after, before, strict=True))

    assert drift(20.0) < 0.8 * drift(1e-9)


def test_penalties_are_the_divergence_where_tokens_were_sampled(tiny_model: Path) -> None:
    rows = make_batch()
    backend = make_backend(tiny_model, kl_coef=0.5, kl_in="reward", kl_estimator="k1", micro_batch_tokens=60)
    found = backend.penalties(rows)
    backend.close()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for row, own in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        reference = now(row, logits[torch.from_numpy(row.mask[1:])]).numpy()
        assert own == pytest.approx(0.5 * (row.logprobs[row.mask] - reference), abs=1e-4)


def test_with_the_divergence_in_the_reward_there_is_none_in_the_loss(tiny_model: Path) -> None:
    rows = make_batch()
    with_reward, _ = gradients(tiny_model, rows, kl_coef=5.0, kl_in="reward")
    without, _ = gradients(tiny_model, rows)
    assert distance(with_reward, without) < 1e-6


# The value head.


def test_an_estimate_without_a_value_is_the_credit_compared_over_tokens() -> None:
    advantages, targets = token_advantages(np.array([1.0, 1.0, 0.0]), np.zeros(3), np.zeros(3), [2, 1], 1.0)
    assert targets.tolist() == [1.0, 1.0, 0.0]
    assert advantages == pytest.approx(np.array([1, 1, -2]) / 3 / np.sqrt(1 / 3), abs=1e-4)


def test_penalties_count_for_the_tokens_before_them() -> None:
    _, targets = token_advantages(np.full(3, 2.0), np.zeros(3), np.array([0.1, 0.2, 0.3]), [3], 1.0)
    assert targets == pytest.approx([1.4, 1.5, 1.7])


def test_responses_are_episodes_of_their_own_however_rows_were_merged() -> None:
    values = np.array([0.5, 0.5, 0.5])
    _, apart = token_advantages(np.array([1.0, 0.0, 0.0]), values, np.zeros(3), [1, 2], 0.0)
    assert apart.tolist() == [1.0, 0.5, 0.0]


def test_one_long_response_does_not_pad_all_others() -> None:
    numbers, lengths = np.random.default_rng(0), [*range(1, 101), 4000, *range(100, 0, -1), 17]
    credit, values, penalties = (numbers.normal(0, 1, sum(lengths)) for _ in range(3))
    tracemalloc.start()
    _, targets = token_advantages(credit, values, penalties, lengths, 0.9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * sum(lengths)  # bytes; padded, it would be more than 2,000 per token
    places = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    alone = [token_advantages(credit[p], values[p], penalties[p], [len(p)], 0.9)[1] for p in places]
    assert targets.tolist() == np.concatenate(alone).tolist()


def test_the_value_head_learns_what_answers_are_worth_and_goes_on_from_a_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = options_of("ppo", learning_rate=1e-7, value_learning_rate=0.05)
    backend = make_backend(tiny_model, **options)
    rows = [recorded(backend, GOOD, 1.0), recorded(backend, BAD, 1.0)]
    errors = [backend.update(rows)["value_loss"] for _ in range(30)]
    assert errors[0] == pytest.approx(0.5)
    assert errors[-1] < 0.05
    assert backend.update(rows)["value_mean"] == pytest.approx(1.0, abs=0.3)
    backend.save(tmp_path / "checkpoint")
    expected = backend.update(rows)
    backend.close()
    again = make_backend(tiny_model, **options)
    again.load(tmp_path / "checkpoint")
    assert again.update(rows)["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    again.close()


def test_a_checkpoint_without_a_value_head_is_refused_for_ppo(tiny_model: Path, tmp_path: Path) -> None:
    backend = make_backend(tiny_model)
    backend.save(tmp_path / "checkpoint")
    backend.close()
    critic = make_backend(tiny_model, algorithm="ppo")
    with pytest.raises(ConfigError, match="does not fit"):
        critic.load(tmp_path / "checkpoint")
    critic.close()


def test_an_error_of_the_value_head_moves_no_weight_of_the_policy(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, algorithm="ppo", learning_rate=1e-2)
    before = {name: value.clone() for name, value in backend._weights_of().masters.items()}
    row = recorded(backend, [40, 40, 40, 40], 1.0)  # all tokens have one advantage: compared, it is 0
    metrics = backend.update([row])
    assert metrics["value_loss"] == pytest.approx(0.5)
    assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-7)
    moved = max(
        float((value - before[name]).detach().abs().max()) for name, value in backend._weights_of().masters.items()
    )
    assert moved < 1e-6
    backend.close()


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "trpo"},
        {"kl_estimator": "k4"},
        {"kl_in": "advantage"},
        {"entropy_coef": -1.0},
        {"gae_lambda": 2.0},
        {"value_clip": 0.0},
        {"algorithm": "gspo", "clip_dual": 3.0},
    ],
)
def test_wrong_options_are_refused(tiny_model: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_backend(tiny_model, **options)
