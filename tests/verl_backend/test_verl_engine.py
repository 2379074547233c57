"""The gateway's engine over vLLM replicas: a server that speaks vLLM's completions, scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from lightning_trainer.backends.verl import engine as verl_engine
from lightning_trainer.backends.verl.engine import ReplicaError, VllmEngine
from lightning_trainer.backends.verl.serving import abilities_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.gateway.engine import SampledPiece, Sampling, measure_wait
from lightning_trainer.gateway.upstream.token_protocols import ADJUSTING

PROMPT = [5, 6, 7]


class Replica:
    """Counts upwards from the last token of the prompt, one token a chunk; holds before token `held`, if set."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.held: int | None = None
        self.holding = asyncio.Event()
        self.status = 200
        self.adapters: list[str] = []

    async def models(self, _: web.Request) -> web.Response:
        base = "/path/of/model"
        return web.json_response({"data": [{"id": base}, *({"id": each, "parent": base} for each in self.adapters)]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for n in range(body["max_tokens"]):
            token = body["prompt"][-1] + 1 + n
            if token == self.held:
                self.holding.set()
                await asyncio.sleep(60)
            last = "length" if n == body["max_tokens"] - 1 else None
            choice = {
                "token_ids": [token],
                "logprobs": {"token_logprobs": [-token / 10]},
                "text": f"{token} ",
                "finish_reason": last,
            }
            await response.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response


@asynccontextmanager
async def serving(replica: Replica) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", replica.models)
    app.router.add_post("/v1/completions", replica.completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine_of(*replicas: Replica, version: int = 3) -> AsyncIterator[tuple[VllmEngine, list[str]]]:
    async with serving(replicas[0]) as first, serving(replicas[-1]) as last:
        addresses = [first] if len(replicas) == 1 else [first, last]
        engine = VllmEngine(tokenizer=None, max_model_len=32)
        await engine.serve(addresses, version)
        try:
            yield engine, addresses
        finally:
            await engine.close()


async def drawn(engine: VllmEngine, sampling: Sampling, prompt: list[int] = PROMPT) -> list[SampledPiece]:
    return [piece async for piece in engine.generate(prompt, sampling)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_tokens_and_log_probabilities_come_as_the_replica_drew_them():
    async with engine_of(Replica()) as (engine, _):
        pieces = await drawn(engine, Sampling(max_tokens=3))
    assert [token for piece in pieces for token in piece.token_ids] == [8, 9, 10]
    assert [value for piece in pieces for value in piece.logprobs] == [-0.8, -0.9, -1.0]
    assert "".join(piece.text for piece in pieces) == "8 9 10 "
    assert pieces[-1].finish_reason == "length"
    assert engine.version == 3


async def test_an_answer_may_wait_for_its_turn_as_long_as_at_any_upstream(monkeypatch):
    monkeypatch.setattr(verl_engine, "SILENCE_S", 0.2)
    replica = Replica()
    replica.held = 8
    async with engine_of(replica) as (engine, _):
        with pytest.raises(ReplicaError, match="broke off"):
            await drawn(engine, Sampling(max_tokens=1))


async def test_the_replica_is_asked_for_ids_and_sampling_as_they_are():
    replica = Replica()
    async with engine_of(replica) as (engine, _):
        await drawn(engine, Sampling(max_tokens=1, temperature=0.5, top_p=0.9, top_k=0, stop=("x",), seed=2**40))
    (body,) = replica.requests
    assert body["prompt"] == PROMPT
    assert body["model"] == "/path/of/model"
    assert (body["temperature"], body["top_p"], body["top_k"], body["stop"]) == (0.5, 0.9, -1, ["x"])
    assert body["logprobs"] == 0
    assert body["return_token_ids"] is True
    assert 0 <= body["seed"] < 2**31


async def test_what_changes_logits_is_said_to_the_replica():
    asked = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    replica = Replica()
    async with engine_of(replica) as (engine, _):
        await drawn(engine, Sampling(max_tokens=1, logit_bias={5: 1.5}, **asked))
        await drawn(engine, Sampling(max_tokens=1))
    changed, plain = replica.requests
    assert {name: changed[name] for name in (*asked, "logit_bias")} == {**asked, "logit_bias": {"5": 1.5}}
    # said all the same: vLLM would take what is left open from the model's generation_config
    assert {name: plain[name] for name in asked} == dict(zip(asked, (0.0, 0.0, 0.0, 1.0), strict=True))
    assert "logit_bias" not in plain


@pytest.mark.parametrize(
    ("options", "does"),
    [
        ({}, ADJUSTING),
        ({"temperature": 1.0}, ADJUSTING),
        ({"temperature": 0.7}, set()),
        ({"staleness": 1}, ADJUSTING - {"presence_penalty", "frequency_penalty"}),
        ({"verl": {"actor_rollout_ref": {"rollout": {"logprobs_mode": "processed_logprobs"}}}}, set()),
        ({"verl": {"actor_rollout_ref.rollout.logprobs_mode": "processed_logprobs"}}, set()),
    ],
)
def test_what_changes_logits_is_done_only_where_log_probabilities_stay_the_policys_own(options, does):
    config = TrainConfig(target="app:run", data="tasks.jsonl", model="m", backend="verl", **options)
    assert abilities_of(config) == does


async def test_an_answer_cut_by_new_weights_goes_on_where_it_was():
    replica = Replica()
    replica.held = 11
    async with engine_of(replica) as (engine, addresses):
        drawing = asyncio.create_task(drawn(engine, Sampling(max_tokens=6)))
        await asyncio.wait_for(replica.holding.wait(), 60)
        assert engine.pause() == 1
        replica.held = None
        await asyncio.sleep(0.05)
        assert not drawing.done()
        await engine.serve(addresses, 4)
        pieces = await asyncio.wait_for(drawing, 60)
    assert [token for piece in pieces for token in piece.token_ids] == [8, 9, 10, 11, 12, 13]
    assert [len(request["prompt"]) for request in replica.requests] == [3, 6]
    assert replica.requests[1]["max_tokens"] == 3
    assert engine.version == 4
    assert {piece.version for piece in pieces} == {3}, "the weights that began it"


async def test_a_call_that_comes_while_weights_change_waits_for_them():
    replica = Replica()
    async with engine_of(replica) as (engine, addresses):
        engine.pause()
        wait = measure_wait()
        drawing = asyncio.create_task(drawn(engine, Sampling(max_tokens=2)))
        await asyncio.sleep(0.05)
        assert not replica.requests
        await engine.serve(addresses, 4)
        pieces = await asyncio.wait_for(drawing, 60)
        assert [piece.version for piece in pieces] == [4, 4], "the weights that sampled it, not those of the request"
        assert wait.seconds > 0.04, "the time for which it was held is no fault of the policy"


async def test_an_answer_that_is_cut_before_its_first_token_has_the_version_that_sampled_it():
    replica = Replica()
    replica.held = 8
    async with engine_of(replica) as (engine, addresses):
        drawing = asyncio.create_task(drawn(engine, Sampling(max_tokens=1)))
        await asyncio.wait_for(replica.holding.wait(), 60)
        engine.pause()
        replica.held = None
        await engine.serve(addresses, 4)
        (piece,) = await asyncio.wait_for(drawing, 60)
    assert piece.version == 4


async def test_a_continuation_draws_with_another_seed():
    replica = Replica()
    replica.held = 9
    async with engine_of(replica) as (engine, addresses):
        drawing = asyncio.create_task(drawn(engine, Sampling(max_tokens=3, seed=7)))
        await asyncio.wait_for(replica.holding.wait(), 60)
        engine.pause()
        replica.held = None
        await engine.serve(addresses, 4)
        await asyncio.wait_for(drawing, 60)
    assert replica.requests[0]["seed"] != replica.requests[1]["seed"]


async def test_calls_go_to_the_replica_with_the_least_to_do():
    busy, idle = Replica(), Replica()
    busy.held = idle.held = 8
    async with engine_of(busy, idle) as (engine, _):
        tasks = [asyncio.create_task(drawn(engine, Sampling(max_tokens=1))) for _ in range(4)]
        await until(lambda: len(busy.requests) + len(idle.requests) == 4)
        assert (len(busy.requests), len(idle.requests)) == (2, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_refusal_of_the_replica_is_an_error_with_its_words():
    replica = Replica()
    replica.status = 400
    async with engine_of(replica) as (engine, _):
        with pytest.raises(ReplicaError, match=r'answered 400: .*"no"'):
            await drawn(engine, Sampling(max_tokens=1))


async def test_a_replica_that_is_gone_is_an_error():
    async with serving(Replica()) as address:
        engine = VllmEngine(tokenizer=None, max_model_len=32)
        await engine.serve([address], 1)
    with pytest.raises(ReplicaError, match="broke off"):
        await drawn(engine, Sampling(max_tokens=1))
    await engine.close()


@pytest.mark.parametrize("prompt", [[], list(range(32))])
async def test_a_prompt_that_leaves_no_room_is_refused(prompt):
    engine = VllmEngine(tokenizer=None, max_model_len=32)
    with pytest.raises(ValueError, match="leaves no room"):
        await drawn(engine, Sampling(), prompt)


async def test_without_a_limit_the_answer_may_fill_the_context():
    async with engine_of(Replica()) as (engine, _):
        assert len(await drawn(engine, Sampling())) == 32 - len(PROMPT)


async def test_requests_name_the_adapter_that_verl_sent_and_never_the_model_without_it():
    replica = Replica()
    async with serving(replica) as address:
        engine = VllmEngine(tokenizer=None, max_model_len=32, adapter=True)
        with pytest.raises(ReplicaError, match=r"does not list the LoRA adapter .*lora\.merge"):
            await engine.serve([address], 1)
        replica.adapters = ["123"]
        await engine.serve([address], 1)
        try:
            await drawn(engine, Sampling(max_tokens=1))
        finally:
            await engine.close()
    assert [body["model"] for body in replica.requests] == ["123"]
