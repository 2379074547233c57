"""A checkpoint's adapters on a vLLM that runs: loaded there, and answered for under their own names."""

from __future__ import annotations

import json

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream.adapters import load_adapters
from lightning_trainer.gateway.upstream.upstream import Upstream


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    for name in ("writer", "rewriter"):
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text("{}")
    (folder / "adapters.json").write_text(json.dumps({"base": "/m", "adapters": ["writer", "rewriter"]}))
    return folder


class Vllm:
    """The route of a vLLM that loads adapters, and those that need a rank refused."""

    def __init__(self):
        self.asked = []
        self.keys = set()

    async def load(self, request):
        body = await request.json()
        self.asked.append((body["lora_name"], body["lora_path"], body["load_inplace"]))
        self.keys.add(request.headers.get("authorization"))
        if "huge" in body["lora_name"]:
            return JSONResponse({"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16."}}, 400)
        return PlainTextResponse("Success")


@pytest.fixture
def vllm():
    made = Vllm()
    server = ServerThread(Starlette(routes=[Route("/v1/load_lora_adapter", made.load, methods=["POST"])]))
    made.url = f"{server.start()}/v1"
    yield made
    server.stop()


def test_every_server_loads_every_adapter_which_gets_an_upstream_of_its_name(checkpoint, vllm):
    base = Upstream("base", vllm.url, key="k", replicas=(vllm.url,))
    found = load_adapters(checkpoint.parent, [base])
    assert [(one.model, one.url, one.replicas, one.key) for one in found] == [
        (name, vllm.url, (vllm.url,), "k") for name in ("writer", "rewriter")
    ]
    once = [(name, str((checkpoint / name).resolve()), True) for name in ("writer", "rewriter")]
    assert vllm.asked == [*once, *once]
    assert vllm.keys == {"Bearer k"}


def test_what_vllm_says_against_an_adapter_is_told(checkpoint, vllm):
    (checkpoint / "writer").rename(checkpoint / "huge")
    (checkpoint / "adapters.json").write_text(json.dumps({"base": "/m", "adapters": ["huge"]}))
    with pytest.raises(ConfigError, match=r"did not load the adapter huge from .*: LoRA rank 64 is greater"):
        load_adapters(checkpoint, [Upstream("base", vllm.url)])


def test_server_that_loads_no_adapters_is_told_how_to_start(checkpoint, vllm):
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora"):
        load_adapters(checkpoint, [Upstream("base", vllm.url.replace("/v1", "/v2"))])
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9/v1 did not load the adapter writer"):
        load_adapters(checkpoint, [Upstream("base", "http://127.0.0.1:9/v1")])


def test_what_is_no_checkpoint_of_adapters_or_has_no_one_base_is_refused(checkpoint, tmp_path):
    one = Upstream("base", "http://127.0.0.1:9/v1")
    for upstreams, words in (([], "0 are given"), ([one, one], "2 are given")):
        with pytest.raises(ConfigError, match=words):
            load_adapters(checkpoint, upstreams)
    with pytest.raises(ConfigError, match="has the name of an adapter"):
        load_adapters(checkpoint, [Upstream("writer", one.url)])
    with pytest.raises(ConfigError, match=r"has no adapters\.json"):
        load_adapters(tmp_path, [one])
    (checkpoint / "writer" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="names the adapter writer, but"):
        load_adapters(checkpoint, [one])
