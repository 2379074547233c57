"""A server with the interface of vLLM's: token ids in and out, adapters and weights that change while it runs.

It notes what it is asked in the file SCRIPTED_LOG. SCRIPTED_FAULT makes it fail: `frozen` accepts adapters and does not
use them after each one's first version, `start` ends it before it answers, `crash` ends it once, while it answers,
`again` does so too and ends the next one before it answers, `outage` does so too, and the next one starts once the
file SCRIPTED_LOG with the suffix `.back` exists, `hang` stops it once, while it answers, with SIGSTOP, `broken` ends
one answer before it is complete, and nothing else, `port` finds its port taken once, `asleep` ends it once,
while it sleeps, `waking` once, after it has answered /wake_up with an error, `sending` once, when it gets new weights
after an update, and `scoring` once, when it is asked for log-probabilities after one. `trainer` kills the run,
SCRIPTED_TRAINER, when it is to sleep for the second time. Asleep, it answers /wake_up and /health only: the real one's
memory is gone then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import uvicorn
from peft import PeftModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_trainer.backends.torch.generate.grammar import Grammars

FAULT, LOG = "", Path()  # set by `main`: a process that is forked from a warm one has another environment
CRASH_AT = 20  # answers after which it ends


class Server:
    def __init__(self, options):
        torch.set_num_threads(1)
        self.base = read_model(options.model, options.quantization)
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.options = options
        self.grammars = Grammars(self.tokenizer, len(self.tokenizer), [self.tokenizer.eos_token_id])
        self.model, self.adapters, self.answers = None, {}, 0
        self.lock = threading.Lock()
        self.sleeping, self.slept = False, 0

    def note(self, **event):
        with LOG.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **event}) + "\n")

    async def load(self, request):
        self.crash_once("sending", self.slept)
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        rank = json.loads(Path(path, "adapter_config.json").read_text())["r"]
        if rank > self.options.max_lora_rank:
            message = f"LoRA rank {rank} is greater than max_lora_rank {self.options.max_lora_rank}."
            return JSONResponse({"error": {"message": message}}, 500)
        with self.lock:
            inner = f"a{len(self.adapters)}"
            first = next((used for known, (_, used) in self.adapters.items() if policy(known) == policy(name)), None)
            if FAULT == "frozen" and first is not None:
                inner = first
            elif self.model is None:
                self.model = PeftModel.from_pretrained(self.base, path, adapter_name=inner).eval()
            else:
                self.model.load_adapter(path, adapter_name=inner)
            self.adapters[name] = (path, inner)
        self.note(load=name)
        return PlainTextResponse("Success")

    async def replace(self, request):
        self.crash_once("sending", self.slept)
        asked = await request.json()
        assert asked["method"] == "reload_weights"
        with self.lock:
            self.base = AutoModelForCausalLM.from_pretrained(
                asked["kwargs"]["weights_path"], dtype=torch.float32
            ).eval()
        self.note(replace=True)
        return PlainTextResponse("")

    async def forget(self, request):
        self.note(forget=True)
        return PlainTextResponse("")

    def crash_once(self, fault, now=True):
        if fault == FAULT and now and not LOG.with_suffix(".crashed").exists():
            self.crash()

    def crash(self):
        LOG.with_suffix(".crashed").touch()
        print("RuntimeError: CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os._exit(1)

    async def sleep(self, request):
        self.sleeping = True
        self.slept += 1
        self.note(sleep=request.query_params["level"])
        if FAULT == "trainer" and self.slept == 2:
            os.kill(int(os.environ["SCRIPTED_TRAINER"]), signal.SIGKILL)
        return PlainTextResponse("", background=BackgroundTask(self.crash_once, "asleep"))

    async def wake(self, request):
        if FAULT == "waking" and not LOG.with_suffix(".crashed").exists():
            said = {"error": {"message": "EngineCore encountered an issue."}}
            return JSONResponse(said, 500, background=BackgroundTask(self.crash))
        self.sleeping = False
        self.note(wake=True)
        return PlainTextResponse("")

    def awake(self, called):
        async def answer(request):
            if self.sleeping:
                self.note(while_asleep=request.url.path)
                return JSONResponse({"error": {"message": "CUDA error: an illegal memory access"}}, 500)
            return await called(request)

        return answer

    async def unload(self, request):
        name = (await request.json())["lora_name"]
        self.note(unload=name)
        with self.lock:
            self.adapters[f"unloaded {len(self.adapters)} {name}"] = self.adapters.pop(name)
        return PlainTextResponse("Success")

    async def metrics(self, request):
        return PlainTextResponse(f'vllm:lora_requests_info{{max_lora="{self.options.max_loras}"}} 1.0\n')

    async def models(self, request):
        length, base = self.options.max_model_len, self.options.served_model_name
        cards = [{"id": base, "owned_by": "vllm", "max_model_len": length, "root": self.options.model}]
        cards += [{"id": name, "parent": base, "root": path} for name, (path, _) in self.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    def logits(self, name, ids):
        with self.lock, torch.no_grad():
            tokens = torch.tensor([ids])
            if self.model is None:
                return self.base(tokens).logits[0]
            if name == self.options.served_model_name:
                with self.model.disable_adapter():
                    return self.model(tokens).logits[0]
            self.model.set_adapter(self.adapters[name][1])
            return self.model(tokens).logits[0]

    async def complete(self, request):
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        if body["model"] != self.options.served_model_name and body["model"] not in self.adapters:
            return JSONResponse({"error": {"message": f"The model {body['model']} does not exist."}}, 404)
        if "prompt_logprobs" in body:
            self.crash_once("scoring", "@1." in body["model"])
            ids = body["prompt"]
            found = torch.log_softmax(self.logits(body["model"], ids), -1)
            told = [{str(token): {"logprob": float(found[at, token])}} for at, token in enumerate(ids[1:])]
            return JSONResponse({"choices": [{"index": 0, "text": "", "prompt_logprobs": [None, *told]}]})
        if not body.get("stream"):
            ids = self.tokenizer.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
            scores = torch.log_softmax(self.logits(body["model"], ids)[-1] / body.get("temperature", 1.0), -1)
            return JSONResponse({"choices": [{"text": "", "logprobs": {"top_logprobs": [{"a": float(scores.max())}]}}]})
        self.note(answer=body["model"])
        return StreamingResponse(self.sample(body), media_type="text/event-stream")

    async def sample(self, body):
        self.answers += 1
        ids, random = list(body["prompt"]), torch.Generator().manual_seed(body["seed"])
        grammar = self.grammars.make(body["structured_outputs"]["grammar"]) if "structured_outputs" in body else None
        for number in range(body["max_tokens"]):
            logits = self.logits(body["model"], ids)[-1] / body["temperature"]
            if grammar is not None:  # vLLM, too, masks before it computes log-probabilities
                logits[~torch.from_numpy(grammar.allowed(len(logits)))] = -torch.inf
            scores = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(scores.exp(), 1, generator=random))
            if grammar is not None:
                grammar.take(token)
            ids.append(token)
            ended = token == self.tokenizer.eos_token_id
            reason = "stop" if ended else "length" if number + 1 == body["max_tokens"] else None
            text = "" if ended else self.tokenizer.decode([token])
            chosen = {"token_logprobs": [float(scores[token])], "tokens": [text]}
            choice = {"index": 0, "text": text, "token_ids": [token], "logprobs": chosen, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            self.crash_once("crash", self.answers > CRASH_AT)
            self.crash_once("again", self.answers > CRASH_AT)
            self.crash_once("outage", self.answers > CRASH_AT)
            if FAULT in ("hang", "broken") and self.answers > CRASH_AT and not LOG.with_suffix(".crashed").exists():
                LOG.with_suffix(".crashed").touch()
                if FAULT == "broken":
                    return
                os.kill(os.getpid(), signal.SIGSTOP)
            if reason:
                break
        yield "data: [DONE]\n\n"


def read_model(folder, quantization):
    """Load a model; `bitsandbytes` rounds each linear layer but the head, with the arguments of vLLM's loader."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if quantization else torch.float32).eval()
    if quantization == "bitsandbytes":
        from bitsandbytes import functional

        for layer in base.model.modules():
            if isinstance(layer, torch.nn.Linear):
                codes, state = functional.quantize_4bit(layer.weight.data, compress_statistics=True, quant_type="nf4")
                layer.weight.data = functional.dequantize_4bit(codes, state)
    return base.float()


def policy(name):
    return name.split(" ")[-1].partition("@")[0]


def main():
    global FAULT, LOG
    FAULT, LOG = os.environ.get("SCRIPTED_FAULT", ""), Path(os.environ["SCRIPTED_LOG"])
    parser = argparse.ArgumentParser()
    for name in ("host", "model", "served-model-name", "middleware", "quantization"):
        parser.add_argument(f"--{name}")
    for name in ("port", "max-model-len", "max-lora-rank", "max-loras"):
        parser.add_argument(f"--{name}", type=int)
    options, others = parser.parse_known_args()
    if FAULT == "start":
        print("ValueError: the model has no config.json\nRuntimeError: Engine core initialization failed. See above.")
        sys.exit(1)
    once = LOG.with_suffix(".once")
    if FAULT == "port" and not once.exists():
        once.touch()
        sys.exit("OSError: [Errno 98] Address already in use")
    if FAULT == "again" and LOG.with_suffix(".crashed").exists() and not once.exists():
        once.touch()
        sys.exit("ValueError: Free memory on device is less than desired")
    while FAULT == "outage" and LOG.with_suffix(".crashed").exists() and not LOG.with_suffix(".back").exists():
        time.sleep(0.1)
    server = Server(options)
    others += ["--quantization", options.quantization] if options.quantization else []
    server.note(
        model=options.model,
        start=[*others, "--max-loras", str(options.max_loras), "--max-lora-rank", str(options.max_lora_rank)],
    )
    paths = {"load_lora_adapter": server.load, "unload_lora_adapter": server.unload, "completions": server.complete}
    routes = [Route(f"/v1/{path}", server.awake(called), methods=["POST"]) for path, called in paths.items()]
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        routes += [Route("/collective_rpc", server.awake(server.replace), methods=["POST"])]
        routes += [Route("/reset_prefix_cache", server.awake(server.forget), methods=["POST"])]
        if "--enable-sleep-mode" in others:
            routes += [
                Route("/sleep", server.sleep, methods=["POST"]),
                Route("/wake_up", server.wake, methods=["POST"]),
            ]
    routes += [Route("/v1/models", server.models), Route("/metrics", server.metrics)]
    routes += [Route("/health", lambda request: PlainTextResponse("ok"))]
    app = Starlette(routes=routes)
    if options.middleware:
        module, _, kind = options.middleware.rpartition(".")
        app.add_middleware(getattr(importlib.import_module(module), kind))
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
