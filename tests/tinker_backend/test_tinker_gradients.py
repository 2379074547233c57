"""The gradient that a Tinker server takes is that of the loss, whatever it divides by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.tinker.adapter import Scaling
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.learner import TinkerLearner
from lightning_trainer.kits.sft.dpo import Dpo
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
from lightning_trainer.rl.losses import importance_weights, kl_divergence
from lightning_trainer.rl.rows import Row, token_weights
from support.tinker import VOCABULARY, Server

LOSSES = {
    "grpo": {},
    "dr-grpo": {"loss_aggregation": "sequence-sum", "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0},
    "gspo": {"clip_low": 3.0, "clip_high": 4.0, "loss_aggregation": "sequence-mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 0.28},
    "rloo": {"loss_aggregation": "sequence-mean"},
    "reinforce++": {"clip_high": 0.2},
    "ppo": {"clip_high": 0.2},
    "distil": {},
    "likelihood": {},
}


def expected(
    server: Server, rows: Sequence[Row], name: str, kl_coef: float, options: dict, **importance: float
) -> np.ndarray:
    """The gradient of the whole loss by torch, at an adapter of zeros; with importance weights ratios are 1."""
    table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)
    scores = torch.log_softmax(torch.from_numpy(server.base) + table, -1)
    frozen = torch.log_softmax(torch.from_numpy(server.base), -1)

    def joined(each: Callable[[Row], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([each(row) for row in rows]).astype(np.float32))

    before = joined(lambda row: row.tokens[:-1][row.mask[1:]]).long()
    after = joined(lambda row: row.tokens[1:][row.mask[1:]]).long()
    weights = torch.from_numpy(np.concatenate(token_weights(rows, options.get("loss_aggregation", "token-mean"))))
    lengths = torch.tensor([length for row in rows for length in row.lengths])
    now = scores[before, after].float()
    old = joined(lambda row: row.logprobs[row.mask])
    if importance:
        weights, old = weights * importance_weights(now.detach() - old, **importance), now.detach()
    tokens = TrainedTokens(
        now, old, joined(lambda row: row.advantages[row.mask]), weights,
        torch.arange(len(lengths)).repeat_interleave(lengths),
    )  # fmt: skip
    clip = Clip(options.get("clip_low", 0.2), options.get("clip_high", 0.28), options.get("clip_dual"))
    loss = algorithm_by_name(name).policy_loss(tokens, clip).loss
    loss = loss + kl_coef * (weights * kl_divergence(now, frozen[before, after].float(), "k3")).sum()
    loss.backward()
    return table.grad.numpy()


def gradient_of(server: Server, learner: TinkerLearner, rows: Sequence[Row]) -> np.ndarray:
    adapter = next(iter(learner._policies.values())).adapter
    learner.update(rows)
    return server.gradients[adapter.model_id][-1]


@pytest.mark.parametrize("averages", ["nothing", "step", "request", "request-tokens"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_loss_on_servers_that_sum_and_that_average(
    name: str, averages: str, server: Server, opened, rows
) -> None:
    server.averages = averages
    batch = rows(9, 30, 14, 5)
    found = gradient_of(server, opened(algorithm=name, **LOSSES[name]), batch)
    wanted = expected(server, batch, name, 0.0, LOSSES[name])
    assert np.abs(wanted).max() > 1e-3
    assert np.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("averages", ["nothing", "step"])
def test_gradient_of_preferences_is_that_of_dpo(averages: str, server: Server, opened, rows) -> None:
    server.averages, beta = averages, 0.5
    pairs = list(zip(rows(9, 30), rows(14, 5, seed=1), strict=True))
    learner = opened(algorithm="likelihood", loss_aggregation="sequence-sum", learning_rate=0.05)
    dpo = Dpo(learner, pairs, beta)
    dpo.update([chosen for chosen, _ in pairs])  # from there on the margins are not 0
    adapter = next(iter(learner._policies.values())).adapter
    table = torch.from_numpy(adapter.client.table.weights.copy()).requires_grad_()
    base = torch.from_numpy(server.base)

    def gained(row: Row) -> torch.Tensor:
        before, after = (torch.from_numpy(part[row.mask[1:]]).long() for part in (row.tokens[:-1], row.tokens[1:]))
        now, start = (torch.log_softmax(scores, -1)[before, after] for scores in (base + table, base))
        return (now - start).sum()

    margins = torch.stack([gained(chosen) - gained(rejected) for chosen, rejected in pairs])
    assert margins.abs().min().item() > 0.1
    responses = sum(row.transitions for pair in pairs for row in pair)
    (-torch.nn.functional.logsigmoid(beta * margins).sum() * 2 / responses).backward()
    dpo.update([chosen for chosen, _ in pairs])
    assert np.allclose(server.gradients[adapter.model_id][-1], table.grad.numpy(), atol=1e-6)


def test_divergence_is_part_of_the_gradient(server: Server, opened, rows) -> None:
    batch, learner = rows(9, 20), opened(kl_coef=0.5)
    policy = next(iter(learner._policies.values()))
    policy.adapter.client.table.weights[:] = 0.0
    found = gradient_of(server, learner, batch)
    assert np.allclose(found, expected(server, batch, "grpo", 0.5, {}), atol=1e-6)


@pytest.mark.parametrize("importance", [{"cap": 1.5}, {"mask": 3.0}, {"moment": 0.3}])
def test_rows_that_older_weights_sampled_weigh_as_on_torch(importance, server: Server, opened, rows) -> None:
    batch = rows(9, 30, 14, 5)
    chosen = {f"importance_{name}": value for name, value in importance.items()}
    learner = opened(old_logprobs="recompute", **chosen)
    found = gradient_of(server, learner, batch)
    assert np.allclose(found, expected(server, batch, "grpo", 0.0, {}, **importance), atol=1e-6)
    assert not np.allclose(found, expected(server, batch, "grpo", 0.0, {}), atol=1e-4)
    assert "importance_masked" in learner.update(batch)


def test_rows_without_gradient_count_in_the_denominators_and_are_not_sent(server: Server, opened, rows) -> None:
    flat, steep = rows(12, 9)
    flat.advantages[:] = 0.0
    learner = opened()
    found = gradient_of(server, learner, [flat, steep])
    assert np.allclose(found, expected(server, [flat, steep], "grpo", 0.0, {}), atol=1e-6)
    assert learner.bill.total.trained == len(steep.tokens) - 1


def test_each_pass_over_a_batch_and_each_minibatch_takes_a_step(server: Server, opened, rows) -> None:
    learner = opened(update_epochs=2, minibatches=2, learning_rate=0.05)
    adapter = next(iter(learner._policies.values())).adapter
    metrics = learner.update(rows(9, 12, 8, 20))
    assert len(server.gradients[adapter.model_id]) == 4
    assert metrics["ratio_max"] > 1.0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("averages", "scaling"),
    [
        ("nothing", Scaling()),
        ("step", Scaling(tokens=True, sequences="sequences of a step")),
        ("request", Scaling(sequences="sequences of a request")),
    ],
)
def test_what_a_server_divides_by_is_measured(averages: str, scaling: Scaling, server: Server, opened) -> None:
    server.averages, server.clips, server.snapshots = averages, averages == "nothing", averages != "step"
    findings = opened().findings
    assert (findings.scaling, findings.clips, findings.snapshots) == (scaling, server.clips, server.snapshots)
    assert server.asked.count("create") == 2
    assert "unload model-1" in server.asked


def test_server_whose_division_no_weight_undoes_is_refused(server: Server, opened) -> None:
    server.averages = "all-tokens"
    with pytest.raises(TinkerError, match="scales gradients in a way that is not known"):
        opened()


def test_rows_of_another_temperature_are_refused(opened, rows) -> None:
    with pytest.raises(ConfigError, match=r"temperature 0\.7"):
        opened().update(rows(9, temperature=0.7))
