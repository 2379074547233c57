"""Agents that share a policy: whose gradient it is, and what each one's calls weigh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.learn import shares
from lightning_trainer.rl.rows import Row, token_weights
from lightning_trainer.rl.teams.agent_weights import weigh_agents
from support.models.updates import distance, gradients, make_backend, make_batch, make_row


def team(talks: int = 10) -> list[Row]:
    """Rows of a talker that says ten times as much as the writer, about other things."""
    batch = make_batch(count=talks + 1)[: talks + 1]
    return [replace(row, agent="writer" if n == 4 else "talker") for n, row in enumerate(batch)]


def exact_squares(model: Path, rows: list[Row], **options: object) -> dict[str, float]:
    """Squared norms of each agent's gradient, from a pass in which the other's advantages are 0."""
    found = {}
    for agent in ("writer", "talker"):
        own = [row if row.agent == agent else replace(row, advantages=0 * row.advantages) for row in rows]
        ours, _ = gradients(model, own, **options)
        found[agent] = sum(float(gradient.double().square().sum()) for gradient in ours.values())
    return found


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_tokens": 60}, {"lora_rank": 2}, {"agent_weight": {"writer": 3.0}}]
)
def test_gradient_shares_are_those_of_each_agents_own_gradient(tiny_model: Path, options: dict) -> None:
    rows = team()
    squares = exact_squares(tiny_model, rows, **options)
    backend = make_backend(tiny_model, **options)
    metrics = backend.update(rows)
    backend.close()
    for agent, square in squares.items():
        assert metrics[f"gradient_share/{agent}"] == pytest.approx(square / sum(squares.values()), rel=1e-4)


def test_an_agent_without_a_gradient_has_no_share(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    flat = [row if row.agent == "talker" else replace(row, advantages=0 * row.advantages) for row in team()]
    metrics = backend.update(flat)
    backend.close()
    assert (metrics["gradient_share/talker"], metrics["gradient_share/writer"]) == (1.0, 0.0)


def test_a_sample_of_the_entries_estimates_the_shares(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = team()
    squares = exact_squares(tiny_model, rows)
    backend = make_backend(tiny_model)
    entries = sum(master.numel() for master in backend._weights_of().masters.values())
    monkeypatch.setattr(shares.AgentGradients.__init__, "__defaults__", (entries // 2,))
    share = backend.update(rows)["gradient_share/writer"]
    backend.close()
    assert share == pytest.approx(squares["writer"] / sum(squares.values()), rel=0.1)


def test_each_adapter_has_its_part_and_a_single_agent_none(tiny_model: Path) -> None:
    rows = [replace(row, policy=row.agent) for row in team()]
    backend = make_backend(tiny_model, adapters=("writer", "talker"), lora_rank=2)
    metrics = backend.update(rows)
    squares = {agent: metrics[f"grad_norm/{agent}"] ** 2 for agent in ("writer", "talker")}
    for agent, square in squares.items():
        assert metrics[f"gradient_share/{agent}"] == pytest.approx(square / sum(squares.values()), rel=1e-4)
    assert not any("gradient_share" in name for name in backend.update([row for row in rows if row.agent == "writer"]))
    backend.close()


def test_the_weight_of_an_agent_multiplies_its_gradient_alone(tiny_model: Path) -> None:
    rows = team()
    each = {}
    for agent in ("writer", "talker"):
        own = [row if row.agent == agent else replace(row, advantages=0 * row.advantages) for row in rows]
        each[agent], _ = gradients(tiny_model, own)
    weighed, _ = gradients(tiny_model, rows, agent_weight={"writer": 2.0})
    expected = {name: 2.0 * each["writer"][name] + each["talker"][name] for name in weighed}
    assert distance(weighed, expected) < 1e-5


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-sum"])
def test_equal_weights_give_each_agents_tokens_the_same_sum(aggregation: str) -> None:
    rows = team()
    plain = token_weights(rows, aggregation)
    sums: Counter[str] = Counter()
    for row, own in zip(rows, weigh_agents(rows, plain, "equal"), strict=True):
        sums[row.agent] += float(own.sum())
    assert sums["writer"] == pytest.approx(sums["talker"], rel=1e-5)
    assert sum(sums.values()) == pytest.approx(sum(float(own.sum()) for own in plain), rel=1e-5)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({"billing/extract": 4.0}, (4.0, 1.0)),
        ({"solver*": 4.0}, (1.0, 4.0)),
        ({"solver*": 4.0, "solver-a": 2.0}, (1.0, 2.0)),
        ({"extract": 2.0, "billing/extract": 4.0}, (4.0, 1.0)),
    ],
)
def test_a_weight_is_that_of_the_most_specific_name_of_the_agent(
    weight: dict[str, float], expected: tuple[float, float]
) -> None:
    rows = [make_row([5, 6, 7], slice(1, None), agent=agent) for agent in ("app/billing/extract", "solver-a")]
    found = weigh_agents(rows, [np.ones(2, np.float32)] * 2, weight)
    assert [own.tolist() for own in found] == [[factor] * 2 for factor in expected]


@pytest.mark.parametrize("weight", [{"writer": 0.0}, {"writer": -1.0}, "even"])
def test_a_weight_that_weighs_nothing_is_refused(tiny_model: Path, weight: object) -> None:
    with pytest.raises(ConfigError, match="agent_weight"):
        make_backend(tiny_model, agent_weight=weight)


def learned_by_writer(model: Path, agent_weight: object) -> tuple[float, float]:
    """Ten updates of a team in which the talker has ten calls for each of the writer's.

    Their prompts differ in the last token, and the talker is paid for the answer that costs the writer.

    Returns:
        How much likelier the writer's good answer has become, and its mean share of the gradient.
    """
    common = list(range(10, 30))
    writer, good, bad = [*common, 31], 40, 50
    rows = [make_row([*writer, good], slice(21, 22), 1.0, agent="writer")]
    rows += [make_row([*writer, bad], slice(21, 22), -1.0, agent="writer")]
    for n in range(10):
        prompt = [*common, 60 + n]
        rows += [make_row([*prompt, bad], slice(21, 22), 1.0, agent="talker")]
        rows += [make_row([*prompt, good], slice(21, 22), -1.0, agent="talker")]
    backend = make_backend(model, learning_rate=3e-4, agent_weight=agent_weight, max_grad_norm=1e9)
    before, share = float(backend.logprobs(rows[:1])[0][0]), []
    for _ in range(10):
        known = zip(rows, backend.logprobs(rows), strict=True)
        sampled = [replace(row, logprobs=_recorded(row, own)) for row, own in known]
        share.append(backend.update(sampled)["gradient_share/writer"])
    after = float(backend.logprobs(rows[:1])[0][0])
    backend.close()
    return after - before, float(np.mean(share))


def _recorded(row: Row, logprobs: np.ndarray) -> np.ndarray:
    found = np.zeros(len(row.tokens), np.float32)
    found[row.mask] = logprobs
    return found


def test_equal_weights_let_the_agent_learn_that_the_talker_had_captured(tiny_model: Path) -> None:
    captured, small = learned_by_writer(tiny_model, {})
    freed, larger = learned_by_writer(tiny_model, "equal")
    assert captured < 0 < freed
    assert small < 0.2 < larger


@pytest.mark.parametrize("options", [{"adapters": ("writer", "talker"), "lora_rank": 2}, {}])
def test_a_policy_returns_bit_for_bit_and_the_others_stay(tiny_model: Path, tmp_path: Path, options: dict) -> None:
    backend = make_backend(tiny_model, learning_rate=1e-2, **options)
    several = bool(options)
    rows = [replace(row, policy=row.agent) if several else row for row in team()]
    name = "writer" if several else backend.engine.model
    backend.update(rows)
    backend.save_policy(name, tmp_path)
    best = {key: value.clone() for key, value in backend._weights_of(name if several else None).masters.items()}
    backend.update(rows)
    other = (
        backend._weights_of("talker").weights()["master." + next(iter(backend._weights_of("talker").masters))].clone()
        if (several)
        else None
    )
    version = {engine.model: engine.version for engine in backend.engines}[name]
    backend.restore_policy(name, tmp_path)
    now = backend._weights_of(name if several else None)
    assert all(best[key].equal(value) for key, value in now.masters.items())
    assert all(best[key].equal(value) for key, value in now.working.items())
    assert not now.optimiser.state
    assert now.steps == 2  # the schedule continues
    assert {engine.model: engine.version for engine in backend.engines}[name] == version + 1
    if other is not None:
        assert other.equal(next(iter(backend._weights_of("talker").masters.values())))
    backend.slow_policy(name, 0.1)
    backend.update(rows)
    assert now.optimiser.param_groups[0]["lr"] == pytest.approx(1e-3)
    (tmp_path / "trainer.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"trainer\.safetensors can't be read.*--resume"):
        backend.restore_policy(name, tmp_path)
    backend.close()


def test_the_first_steps_after_a_return_are_as_large_as_the_learning_rate(tiny_model: Path, tmp_path: Path) -> None:
    backend = make_backend(tiny_model, learning_rate=1e-3, lora_rank=2)
    backend.save_policy(backend.engine.model, tmp_path)
    weights = backend._weights_of()
    master = next(iter(weights.masters.values()))
    gradient = master.new_ones(master.shape)

    def changes(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            before = master.detach().clone()
            master.grad = gradient.clone()
            weights.step()
            found.append(float((before - master.detach()).abs().max()))
        return found

    first = changes(3)
    backend.restore_policy(backend.engine.model, tmp_path)
    assert changes(3) == pytest.approx(first, rel=1e-3)
    assert first == pytest.approx([1e-3] * 3, rel=1e-3)
    assert weights.steps == 6
    resumed = make_backend(tiny_model, learning_rate=1e-3, lora_rank=2)
    resumed._weights_of().set_state(weights.state())
    assert resumed._weights_of().steps == 6
    assert all(value.equal(resumed._weights_of().state()[key]) for key, value in weights.state().items())
    for each in (backend, resumed):
        each.close()


def test_the_divergence_from_the_base_is_measured_of_adapters(tiny_model: Path) -> None:
    backend = make_backend(tiny_model, learning_rate=1e-2, lora_rank=2)
    rows, name = team(), backend.engine.model

    def sampled() -> list[Row]:
        return [
            replace(row, logprobs=_recorded(row, own)) for row, own in zip(rows, backend.logprobs(rows), strict=True)
        ]

    first = backend.update(sampled())[f"kl_base/{name}"]
    for _ in range(3):
        last = backend.update(sampled())[f"kl_base/{name}"]
    backend.close()
    assert first == pytest.approx(0.0, abs=1e-5)
    assert last > 0.01
