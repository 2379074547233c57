"""Policies on a scripted Tinker server: versions, checkpoints, answers, bills, and servers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_trainer import TrainConfig, registry
from lightning_trainer.backends.tinker import checkpoint, options
from lightning_trainer.backends.tinker.bill import (
    Bill,
    BudgetSpentError,
    Prices,
    TokenCount,
    read_prices,
    unmerged_tokens,
)
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.service import Patience, Service
from lightning_trainer.cli import cli
from lightning_trainer.engines.gate import Gate
from lightning_trainer.gateway.engine import SampledPiece, Sampling, measure_wait
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.kits.sft.config import RoundsConfig, SftConfig, with_current_names
from support.tinker import Server, StatusError

PRICES = Prices(prefill=1.0, cached=0.2, sample=3.0, train=2.0, as_of="2026-01-01")


def sample(engine: Any, prompt: list[int], **how: Any) -> SampledPiece:
    async def first() -> SampledPiece:
        return [piece async for piece in engine.generate(prompt, Sampling(**how))][-1]

    return asyncio.run(first())


def test_each_policy_learns_from_its_own_rows_and_has_its_own_version(server: Server, opened, rows) -> None:
    learner = opened(adapters=("writer", "checker"))
    writer, checker = (policy.adapter.client.table for policy in learner._policies.values())
    learner.update(rows(9, 12, policy="writer"))
    assert writer.weights.any()
    assert not checker.weights.any()
    assert [(engine.model, engine.version) for engine in learner.engines] == [
        ("base", 0), ("writer", 1), ("checker", 0),
    ]  # fmt: skip


def test_answer_has_exact_tokens_log_probabilities_and_the_version_that_sampled_it(server, opened, rows) -> None:
    learner = opened()
    learner.update(rows(9, 12))
    piece = sample(learner.engine, [1, 20, 30], max_tokens=8, seed=3)
    table = learner._policies["tiny"].adapter.client.table.weights
    told = server.logprobs(table, [30, *piece.token_ids[:-1]], piece.token_ids)
    assert np.allclose(piece.logprobs, told)
    assert piece.version == 1
    assert piece == sample(learner.engine, [1, 20, 30], max_tokens=8, seed=3)
    billed = learner.bill.total
    assert (billed.prompt, billed.sampled) == (6, 2 * len(piece.token_ids))


def test_stop_string_cuts_an_answer_at_its_last_token(opened) -> None:
    engine = opened().engine
    whole = sample(engine, [1, 20, 30], max_tokens=30, seed=5)
    assert len(whole.text) > 4
    stop = whole.text[3:5]
    cut = sample(engine, [1, 20, 30], max_tokens=30, seed=5, stop=(stop,))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.logprobs) == len(cut.token_ids)


def test_prompt_without_room_is_refused(opened) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        sample(opened(max_model_len=4).engine, [1, 2, 3, 4])


def test_where_weights_are_shared_answers_are_held_back_while_they_change(server: Server) -> None:
    gate, order, inside, waiting = Gate(), [], threading.Event(), threading.Event()

    async def answer(name: str) -> None:
        async with gate.passed():
            inside.set()
            order.append(f"{name} begins")
            await asyncio.to_thread(waiting.wait, 30)
            order.append(f"{name} ends")

    thread = threading.Thread(target=lambda: asyncio.run(answer("one")))
    thread.start()
    assert inside.wait(30)
    changing = threading.Thread(target=lambda: _change(gate, order))
    changing.start()
    waiting.set()
    thread.join(30)
    changing.join(30)
    assert order == ["one begins", "one ends", "weights change"]


def _change(gate: Gate, order: list[str]) -> None:
    with gate.shut():
        order.append("weights change")


@pytest.mark.parametrize("names", [(), ("writer", "checker")])
def test_checkpoint_goes_back_exactly_and_has_folders_of_peft(names, server, opened, rows, tmp_path: Path) -> None:
    learner = opened(adapters=names, update_epochs=2)
    batch = rows(9, 12, policy=names[0] if names else "tiny")
    learner.update(batch)
    learner.save(tmp_path / "saved")
    before = learner.logprobs(batch)
    learner.update(batch)
    after, again = learner.logprobs(batch), opened(adapters=names, update_epochs=2)
    again.load(tmp_path / "saved")
    assert all(np.array_equal(one, other) for one, other in zip(before, again.logprobs(batch), strict=True))
    again.update(batch)
    assert all(np.array_equal(one, other) for one, other in zip(after, again.logprobs(batch), strict=True))
    folder = tmp_path / "saved" / (names[0] if names else ".")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["target_modules"], config["task_type"]) == (["q_proj"], "CAUSAL_LM")
    learner.strip(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"has no tinker\.json"):
        again.load(tmp_path / "saved")


def test_checkpoint_of_another_server_is_refused(opened, rows, tmp_path: Path) -> None:
    learner = opened()
    learner.save(tmp_path)
    values = json.loads((tmp_path / checkpoint.STATE).read_text())
    (tmp_path / checkpoint.STATE).write_text(json.dumps({**values, "url": "http://elsewhere"}))
    with pytest.raises(ConfigError, match="http://elsewhere"):
        learner.load(tmp_path)


def test_checkpoint_that_the_server_lost_says_so(server: Server, opened, tmp_path: Path) -> None:
    learner = opened()
    learner.save(tmp_path)
    server.saved.clear()
    with pytest.raises(TinkerError, match="no longer has this adapter or checkpoint"):
        learner.load(tmp_path)


def test_broken_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TinkerError, match="without an adapter"):
        checkpoint.unpack(b"no tar", tmp_path, "base")


@pytest.mark.parametrize(
    ("operation", "error", "told"),
    [
        ("forward", StatusError(404, "model not found"), "--resume"),
        ("optim_step", StatusError(500, "out of memory"), "failed to take an optimiser step: out of memory"),
        ("publish", StatusError(401, "no"), "TINKER_API_KEY"),
        ("forward_backward", StatusError(402, "payment required"), "balance"),
    ],
)
def test_failed_update_says_what_failed_and_what_to_do(operation, error, told, server, opened, rows) -> None:
    learner = opened()
    server.fail[operation] = error
    with pytest.raises(TinkerError, match=told):
        learner.update(rows(9))


def test_nonsense_teaches_nothing(server: Server, opened, rows) -> None:
    learner = opened()
    server.nonsense = True
    with pytest.raises(TinkerError, match="not finite"):
        learner.update(rows(9))
    assert not learner._policies["tiny"].adapter.client.table.weights.any()
    with pytest.raises(Refusal, match="log-probabilities"):
        sample(learner.engine, [1, 2], max_tokens=3)


@pytest.mark.parametrize(("status", "ended"), [(500, True), (503, True), (None, True), (400, False)])
def test_call_of_a_server_that_fails_is_no_fault_of_the_policy(status, ended: bool, server: Server, opened) -> None:
    learner = opened()
    server.fail["sample"] = ConnectionError("reset") if status is None else StatusError(status, "no")
    wait = measure_wait()
    with pytest.raises(Refusal, match="failed to sample"):
        sample(learner.engine, [1, 2], max_tokens=3)
    assert wait.ended is ended


def test_sdk_that_cannot_sample_names_a_working_pair(server: Server, opened) -> None:
    server.fail["sample"] = AssertionError("asample promises always carry sample_sequence_ids")
    with pytest.raises(TinkerError, match=r"SkyRL 0\.4\.0 works with tinker 0\.25"):
        opened()


def test_server_without_room_for_an_adapter_says_how_to_get_it(server: Server, opened) -> None:
    server.fail["create"] = StatusError(400, "Maximum number of LoRA adapters (2) reached")
    with pytest.raises(TinkerError, match="max_lora_adapters"):
        opened()


def test_model_that_the_server_lacks_is_refused_with_those_it_has(server: Server, opened) -> None:
    server.models = ["Qwen/Qwen3-8B"]
    with pytest.raises(ConfigError, match="It has Qwen/Qwen3-8B"):
        opened()


def test_server_that_is_down_ends_every_later_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def result(self, timeout: float) -> None:
            raise TimeoutError

    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(
        "lightning_trainer.backends.tinker.service.time", SimpleNamespace(monotonic=lambda: next(times))
    )
    monkeypatch.setattr(Service, "_healthy", lambda self: False)
    service = Service("http://tinker.invalid", Patience(down_s=30.0))
    with pytest.raises(TinkerError, match="has not answered for 30 s") as first:
        service.wait(Never(), "learn")
    with pytest.raises(TinkerError) as second:
        service.wait(Never(), "save")
    assert first.value is second.value


def test_merging_is_seen_on_the_bill(rows) -> None:
    (row,) = rows(20)
    places = np.flatnonzero(row.mask)
    assert unmerged_tokens([row]) == places[row.lengths[0] - 1] + places[-1]
    bill = Bill(PRICES)
    bill.add(TokenCount(prompt=10, cached=5, sampled=2, read=19, trained=19, unmerged=2 * 30))
    told = bill.of_step()
    assert told["cost"] == pytest.approx(5 + 5 * 0.2 + 2 * 3 + 19 + 38)
    assert told["cost_unmerged"] == pytest.approx(12 + 30 + 60)


def test_run_ends_before_the_step_that_would_cost_too_much() -> None:
    bill = Bill(PRICES, limit=25.0)
    bill.add(TokenCount(trained=5))
    bill.of_step()
    bill.check()
    bill.add(TokenCount(trained=5))
    bill.of_step()
    with pytest.raises(BudgetSpentError, match="20 is spent"):
        bill.check()


def test_answer_that_might_cost_more_than_is_left_waits_for_others_or_is_refused() -> None:
    bill = Bill(PRICES, limit=10.0)
    order = []

    async def answer(name: str, most: int, sampled: int) -> None:
        async with bill.reserved(TokenCount(sampled=most)):
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            bill.add(TokenCount(sampled=sampled))
            order.append(f"{name} ends")

    async def both() -> None:
        await asyncio.gather(answer("one", 2, 1), answer("two", 2, 1))
        await answer("three", 2, 1)

    with pytest.raises(BudgetSpentError, match="an answer of up to 2 tokens"):
        asyncio.run(both())
    assert order == ["one begins", "one ends", "two begins", "two ends"]
    assert bill.spent == 6.0
    with pytest.raises(BudgetSpentError, match="max-tokens"):
        bill.check()


def test_update_that_costs_more_than_is_left_is_not_sent(server: Server, opened, rows, tmp_path: Path, model) -> None:
    table = {"as_of": "2026-11-01", "models": {str(model): {"prefill": 1.0, "sample": 3.0, "train": 2.0}}}
    (tmp_path / "prices.json").write_text(json.dumps(table))
    learner = opened(prices=tmp_path / "prices.json", max_cost=50.0, update_epochs=2)
    server.asked.clear()
    with pytest.raises(BudgetSpentError, match="the update costs up to 56"):
        learner.update(rows(9))
    assert server.asked == []


def test_price_table_of_the_user_replaces_ours(tmp_path: Path) -> None:
    table = tmp_path / "prices.json"
    table.write_text(
        json.dumps({"as_of": "2026-11-01", "per": 1000, "models": {"m": {"prefill": 1, "sample": 2, "train": 3}}})
    )
    assert read_prices("m", table) == Prices(prefill=1e-3, cached=1e-3, sample=2e-3, train=3e-3, as_of="2026-11-01")
    with pytest.raises(ConfigError, match="has no prices of other"):
        read_prices("other", table)
    table.write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        read_prices("m", table)
    assert read_prices("Qwen/Qwen3-8B", None) is not None
    assert read_prices("other", None) is None


def config(model: Path, **more: Any) -> TrainConfig:
    given = {"target": "a:run", "data": "d", "model": str(model), "backend": "tinker", "tinker_url": "http://x"}
    return TrainConfig(**{**given, **more})


def test_backend_chooses_temperature_and_adapters(model: Path, server: Server) -> None:
    chosen = config(model)
    assert (chosen.temperature, chosen.lora_rank, chosen.learning_rate) == (1.0, 16, 1e-4)
    options.check(chosen)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"algorithm": "ppo"}, "value head"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
        ({"teacher": "self"}, "most probable tokens"),
        ({"algorithm": "distil", "teacher": "./teacher"}, "MODEL=URL"),
        ({"temperature": 0.7}, "temperature"),
        ({"sampling": "asked"}, "sampling"),
        ({"engine": "vllm"}, "engine"),
        ({"tinker_url": None}, "--tinker-url"),
        ({"max_cost": 5.0}, "--prices"),
        ({"workers": 0}, "workers"),
    ],
)
def test_what_a_server_cannot_do_is_refused_by_name(more, told: str, model: Path, server: Server) -> None:
    with pytest.raises(ConfigError, match=told):
        options.check(config(model, **more))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"lora_rank": 0}, "lora_rank = 0 trains all weights"),
        ({"lora_rank": 8, "lora_alpha": 8.0}, "lora_alpha"),
        ({"policies": {"a": "lora", "b": "fixed"}}, "fixed"),
        ({"dtype": "float32"}, "dtype"),
        ({"device": "cuda"}, "device"),
        ({"backend_options": {"slots": 3}}, "slots"),
        ({"backend_options": {"activation_checkpointing": "on"}}, "activation_checkpointing"),
    ],
)
def test_what_its_learner_cannot_do_is_refused_in_runs_and_in_sft(more, told: str, model: Path, server: Server) -> None:
    with pytest.raises(ConfigError, match=told):
        options.check(config(model, **more))
    own = {"tinker_url": "http://x", **more.get("backend_options", {})}
    tuned = SftConfig(data=("d.jsonl",), model=str(model), backend="tinker", **{**more, "backend_options": own})
    with pytest.raises(ConfigError, match=told):
        registry.by_name("backend", "tinker").learner(tuned.model, tuned.learner_options())


def test_sft_has_the_defaults_of_the_server(model: Path, server: Server) -> None:
    given: dict[str, Any] = {"model": str(model), "backend": "tinker"}
    tuned = SftConfig(data=("d.jsonl",), **given)
    assert (tuned.lora_rank, tuned.learning_rate) == (16, 2e-4)
    assert with_current_names({**given, "lora_rank": 0})["lora_rank"] == 16, "which an earlier version did not write"
    rounds: dict[str, Any] = {**given, "target": "a:run", "tasks": "d.jsonl", "rounds": 1}
    assert RoundsConfig(**rounds).temperature == 1.0
    with pytest.raises(ConfigError, match="at temperature 1 only"):
        RoundsConfig(**rounds, temperature=0.7)


def test_a_context_longer_than_the_model_or_the_server_allows_is_refused(server: Server, opened) -> None:
    whole = opened().engine.max_model_len
    assert opened(max_model_len=whole).engine.max_model_len == whole
    with pytest.raises(ConfigError, match=f"max_model_len {whole + 1} is more than the {whole} tokens"):
        opened(max_model_len=whole + 1)
    with pytest.raises(ConfigError, match="temperature = 0"):
        config(Path("m"), temperature=0)


def test_options_of_a_server_are_refused_by_other_backends(model: Path) -> None:
    with pytest.raises(ConfigError, match="tinker_url: an option of backend = tinker"):
        config(model, backend="torch")


def test_supervised_learning_runs_on_a_server_too(server: Server, model: Path, rows) -> None:
    backend = registry.by_name("backend", "tinker")
    learner = backend.learner(
        str(model), {"tinker_url": "http://x", "algorithm": "likelihood", "device": "auto", "dtype": "auto"}
    )
    learner.schedule(1, 4)
    batch = rows(9, 14)
    for row in batch:
        row.advantages[row.mask] = 1.0
    before = [its.mean() for its in learner.logprobs(batch)]
    learner.update(batch)
    assert all(now.mean() > was for now, was in zip(learner.logprobs(batch), before, strict=True))
    assert learner.end_tokens == {2}
    learner.close()


def test_candidates_are_read_one_pass_each(server: Server, opened, rows) -> None:
    learner, (row,) = opened(), rows(9)
    places = np.flatnonzero(row.mask)
    candidates = np.random.default_rng(1).integers(3, 250, (len(places), 3))
    (told,) = learner.logprobs([row], [candidates])
    wanted = [server.logprobs(np.zeros_like(server.base), row.tokens[places - 1], candidates[:, c]) for c in range(3)]
    assert np.allclose(told, np.stack(wanted, 1), atol=1e-6)


@pytest.mark.parametrize("averages", ["nothing", "step"])
def test_doctor_says_what_a_server_can_do(averages: str, server: Server, model: Path) -> None:
    server.averages, server.clips = averages, averages == "nothing"
    result = CliRunner().invoke(cli, ["doctor", "--tinker", "http://tinker.invalid", "--json"])
    told = json.loads(result.stdout.splitlines()[-1])
    over = {"nothing": "nothing", "step": "tokens and sequences of a step"}
    assert (told["averages"], told["clips"], told["adapters"], told["fits"]) == (over[averages], server.clips, 2, True)
    assert "importance_sampling" in told["losses"]
    assert sum(done.startswith("unload") for done in server.asked) == 2


def test_doctor_says_that_nothing_answers(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(Service, "answers", lambda self: False)
    result = CliRunner().invoke(cli, ["doctor", "--tinker", "http://tinker.invalid"])
    assert result.exit_code == 3
    assert "no Tinker server answers at http://tinker.invalid" in result.output
