"""A server that loads LoRA adapters as vLLM does, and checkpoints for it."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from lightning_trainer.gateway.http.serving import ServerThread

NAMES = ("writer", "rewriter")


def write_checkpoint(folder, contents="first", rank=8, names=NAMES):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (folder / name / "adapter_model.safetensors").write_text(f"{name} {contents}")
    (folder / "adapters.json").write_text(json.dumps({"base": "/m", "adapters": list(names)}))
    return folder


class Vllm:
    """Loads adapters as vLLM does, and like it answers from a cache that is keyed by their names."""

    max_rank, max_loras, model = 16, 2, "/m"

    def __init__(self):
        self.contents = {}  # of the adapters that are loaded: what is in each, and where it came from
        self.cache = {}
        self.keys = set()
        self.most = 0
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.unloaded = queue.Queue()
        paths = {"load_lora_adapter": self.load, "unload_lora_adapter": self.unload}
        paths |= {"chat/completions": self.answer, "completions": self.answer}
        routes = [Route(f"/v1/{path}", called, methods=["POST"]) for path, called in paths.items()]
        self.thread = ServerThread(
            Starlette(routes=[*routes, Route("/v1/models", self.models), Route("/metrics", self.metrics)])
        )

    async def load(self, request):
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        folder, name = body["lora_path"], body["lora_name"]
        rank = json.loads(Path(folder, "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            message = f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
            return JSONResponse({"error": {"message": message}}, 500)
        if name in self.contents and not body.get("load_inplace"):
            return JSONResponse({"error": {"message": f"The lora adapter '{name}' has already been loaded."}}, 400)
        self.contents[name] = (Path(folder, "adapter_model.safetensors").read_text(), folder)
        self.most = max(self.most, len(self.contents))
        return PlainTextResponse("Success")

    async def unload(self, request):
        name = (await request.json())["lora_name"]
        del self.contents[name]
        self.unloaded.put(name)
        return PlainTextResponse("Success")

    async def models(self, request):
        adapters = [
            {"id": name, "parent": "base", "root": folder, "owned_by": "vllm"}
            for name, (_, folder) in self.contents.items()
        ]
        return JSONResponse({"object": "list", "data": [{"id": "base", "root": self.model}, *adapters]})

    async def metrics(self, request):
        labels = f'max_lora="{self.max_loras}",running_lora_adapters="",waiting_lora_adapters=""'
        return PlainTextResponse(f"# HELP\nvllm:lora_requests_info{{{labels}}} 1.7\n")

    async def answer(self, request):
        body = await request.json()
        name = body["model"]
        if name not in self.contents:
            return JSONResponse({"error": {"message": f"no model {name}"}}, 404)
        key = (name, json.dumps(body.get("messages")))
        text = self.cache.setdefault(key, self.contents[name][0])
        if "messages" in body:
            self.begun.set()
        while "messages" in body and not self.may_end.is_set():
            await asyncio.sleep(0.01)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "choices": [choice]})
