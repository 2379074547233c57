"""vLLM servers that others started: what they lack is said before the run begins, and a restart is survived."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from lightning_spans.errors import LightningError

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.report.progress import Silent
from support.models.tiny import make_tiny_model
from support.training.policies import calls, config, folder, lines  # noqa: F401 - a fixture among them


class Vllm:
    """As much of vLLM as a run looks at before it begins."""

    name, key, context, places, raw, routes = "base", None, 512, 8, False, True

    def __init__(self, **options):
        vars(self).update(options)
        paths = [Route("/v1/completions", self.complete, methods=["POST"]), Route("/metrics", self.metrics)]
        if self.routes:
            paths.append(Route("/v1/load_lora_adapter", self.load, methods=["POST"]))
        self.thread = ServerThread(Starlette(routes=[*paths, Route("/v1/models", self.models)]))

    async def models(self, request):
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return JSONResponse({"data": [{"id": self.name, "max_model_len": self.context, "root": "/m"}]})

    async def complete(self, request):
        body = await request.json()
        best = -1.0 if self.raw else -1.0 / body.get("temperature", 1.0)
        return JSONResponse({"choices": [{"logprobs": {"top_logprobs": [{"a": best, "b": -9.0}]}}]})

    async def metrics(self, request):
        return PlainTextResponse(f'vllm:lora_requests_info{{max_lora="{self.places}"}} 1.0\n')

    async def load(self, request):
        return JSONResponse({"error": {"message": "No adapter found for /a."}}, 404)


@pytest.mark.parametrize(
    ("server", "path", "words"),
    [
        ({"name": "my-model"}, "/v1", r"answers for my-model\. Start it with --served-model-name base"),
        ({"key": "secret"}, "/v1", r"does not accept the key\. Set VLLM_API_KEY"),
        ({}, "", r"/models is not a list of models: 404 .*Give vLLM's base URL, such as http://127"),
        (
            {"context": 100},
            "/v1",
            r"takes 100 tokens of prompt and answer, and the run 512\..* set max_model_len = 100",
        ),
        ({"raw": True}, "/v1", r"ignore the temperature\. Start it with .*--logprobs-mode processed_logprobs"),
        (
            {"places": 3},
            "/v1",
            r"with 3 adapters at the same time, and 4 are to be served\. Start vLLM with --max-loras 4",
        ),
        ({"routes": False}, "/v1", r"does not load adapters while it runs\. Start vLLM so: VLLM_ALLOW_RUNTIME"),
        ({}, "/v1", r"did not load the adapter writer@0\.\w+ from .*No adapter found"),
    ],
)
def test_what_a_running_server_lacks_ends_the_run_before_it_begins(tiny_model, folder, server, path, words):  # noqa: F811
    vllm = Vllm(**server)
    with vllm.thread, pytest.raises(LightningError, match=words):
        train(config(tiny_model, engine_url=f"{vllm.thread.url}{path}"))


def test_a_running_server_with_other_positions_than_the_learner_ends_the_run(tmp_path, folder):  # noqa: F811
    positions = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = make_tiny_model(
        tmp_path / "tiny", rope_parameters={**positions, "original_max_position_embeddings": 128, "factor": 4.0}
    )
    vllm = Vllm(context=512)
    with (
        vllm.thread,
        pytest.raises(LightningError, match=r"takes 512 tokens, and the run 128\..* \(longrope\) then differ"),
    ):
        train(config(model, engine_url=f"{vllm.thread.url}/v1"))


def test_a_running_server_that_is_not_there_ends_the_run(tiny_model, folder):  # noqa: F811
    with pytest.raises(LightningError, match=r"vLLM at http://127\.0\.0\.1:9/v1/models does not answer"):
        train(config(tiny_model, engine_url="http://127.0.0.1:9/v1"))


@contextmanager
def running(model, port):
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", "base", "--max-model-len", "512", "--max-loras", "4",
        "--max-lora-rank", "8",
    ]  # fmt: skip
    with subprocess.Popen(command, env={**os.environ, "VLLM_API_KEY": "secret"}) as server:
        try:
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    assert server.poll() is None
                    time.sleep(0.1)
            yield server
        finally:
            server.kill()


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Restart(Silent):
    """Kills the server after the first step. Others start it again, without its adapters."""

    def __init__(self, stack, model, port):
        self.stack, self.again = stack, (model, port)

    def step(self, step, metrics):
        if step == 0:
            self.stack.close()
            self.stack.enter_context(running(*self.again))


def test_a_running_server_that_is_restarted_gets_its_adapters_again(tiny_model, folder, scripted, port):  # noqa: F811
    with ExitStack() as stack:
        stack.enter_context(running(tiny_model, port))
        options = {"engine_url": f"http://127.0.0.1:{port}/v1", "steps": 3, "max_attempts": 4}
        train(config(tiny_model, **options), Restart(stack, tiny_model, port))
    metrics = lines(folder / "out")
    assert [line["calls_trained"] for line in metrics] == [12, 12, 12]
    assert all(line["failed"] == 0 for line in metrics)
    assert {call.error for call in calls(folder / "out")} == {None}
    assert all(line["engine_gap/writer"] < 1e-3 for line in metrics)


def test_a_running_server_with_another_model_ends_the_run(tiny_model, folder, scripted, port):  # noqa: F811
    other = make_tiny_model(folder / "other", seed=1)
    with running(other, port), pytest.raises(LightningError, match=r"does not serve the learner's model.* of --model"):
        train(config(tiny_model, engine_url=f"http://127.0.0.1:{port}/v1"))
