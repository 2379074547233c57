"""Scripted servers that take token ids, in the wire formats of vLLM and SGLang; `FakeEngine` draws for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.prompt.template import ChatFormat
from support.fakes import FakeEngine


class TokenUpstream:
    """One server. `asked` holds paths and bodies; `sent` the token ids of the prompts that came as ids.

    Completions of a text are no call: `tried` holds their bodies.

    Attributes:
        kind: ``vllm``, ``sglang`` or ``sglang, incremental``.
        form: of vLLM's ``structured_outputs`` that its backend takes.
        spoils: changes each reply or chunk before it is sent.
        holds: set by a test, to hold a stream after its first chunk until it is set.
    """

    def __init__(self, engine: FakeEngine, kind: str = "vllm", *, template: Any = None) -> None:
        self.engine, self.kind = engine, kind
        self.chat = ChatFormat(template or engine.tokenizer, "hermes")  # it reads calls by a parser of its own
        self.form = "structural_tag"
        self.spoils: Any = lambda data: data
        self.holds: asyncio.Event | None = None
        self.status = 200
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tried: list[dict[str, Any]] = []
        routes = [Route("/v1/models", self._models)]
        paths = ("/tokenize", "/generate", "/v1/completions", "/v1/chat/completions")
        routes += [Route(path, self._ask, methods=["POST"]) for path in paths]
        self.app = Starlette(routes=routes)

    @property
    def sent(self) -> list[tuple[int, ...]]:
        return [tuple(body.get("input_ids") or body["prompt"]) for path, body in self.asked if path in _TOKEN_PATHS]

    @contextmanager
    def running(self) -> Iterator[str]:
        thread = ServerThread(self.app)
        try:
            yield f"{thread.start()}/v1"
        finally:
            thread.stop()

    async def _models(self, _: Any) -> Response:
        owner = self.kind.partition(",")[0]
        return JSONResponse({"data": [{"id": "m", "owned_by": owner, "max_model_len": self.engine.max_model_len}]})

    async def _ask(self, request: Any) -> Response:
        body, path = await request.json(), request.url.path
        if path == "/tokenize":
            text = body.get("prompt") or self.chat.render(body["messages"], ())
            return JSONResponse({"tokens": self.chat.encode(text)})
        if self.status != 200:
            self.asked.append((path, body))
            return JSONResponse({"error": {"message": "overloaded"}}, self.status)
        failed = body.get("structured_outputs", {}).keys() - {self.form}
        if isinstance(body.get("prompt"), str):
            self.tried.append(body)
            return JSONResponse({"choices": []}, 500 if failed else 200)
        self.asked.append((path, body))
        if failed:
            return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, 500)
        if path == "/v1/chat/completions":
            return await self._chat(body)
        return await (self._generate(body) if path == "/generate" else self._complete(body))

    async def _chat(self, body: dict[str, Any]) -> Response:
        """As sent messages: what is drawn comes back as plain content, tokens among it."""
        prompt = self.chat.encode(self.chat.render(body["messages"], body.get("tools") or ()))
        pieces = [piece async for piece in self.engine.generate(prompt, Sampling(max_tokens=body.get("max_tokens")))]
        ids, logprobs, text = _together(pieces)
        content = [{"token": "x", "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        choice |= {"token_ids": ids, "logprobs": {"content": content}}
        return JSONResponse({"id": "chat", "choices": [choice], "prompt_token_ids": prompt})

    async def _complete(self, body: dict[str, Any]) -> Response:
        def reply(ids, logprobs, text, finish, first):
            choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
            choice["logprobs"] = {"tokens": ["x"] * len(ids), "token_logprobs": logprobs}
            return {"choices": [choice | ({"prompt_token_ids": body["prompt"]} if first else {})]}

        sampling = Sampling(max_tokens=body["max_tokens"], stop=tuple(body["stop"]), temperature=body["temperature"])
        pieces = self.engine.generate(body["prompt"], sampling)
        if not body["stream"]:
            drawn = [piece async for piece in pieces]
            return JSONResponse(self.spoils(reply(*_together(drawn), drawn[-1].finish_reason, True)))

        async def chunks():
            first = True
            async for piece in pieces:
                yield reply(list(piece.token_ids), list(piece.logprobs), piece.text, piece.finish_reason, first)
                first = False
            yield {"choices": [], "usage": {}}

        return self._events(chunks())

    async def _generate(self, body: dict[str, Any]) -> Response:
        asked = body["sampling_params"]
        sampling = Sampling(max_tokens=asked["max_new_tokens"], stop=tuple(asked["stop"]))
        pieces = self.engine.generate(body["input_ids"], sampling)

        def reply(shown, total, text, finish):
            pairs = [[logprob, token, None] for piece in shown for token, logprob in _pairs(piece)]
            meta = {"id": "x", "output_token_logprobs": pairs, "output_token_logprobs_length": total}
            reason = None if finish is None else {"type": finish}
            meta |= {"prompt_tokens": len(body["input_ids"]), "completion_tokens": total, "finish_reason": reason}
            return {"text": text, "output_ids": [pair[1] for pair in pairs], "meta_info": meta}

        if not body["stream"]:
            drawn = [piece async for piece in pieces]
            total, text = sum(len(piece.token_ids) for piece in drawn), "".join(piece.text for piece in drawn)
            return JSONResponse(self.spoils(reply(drawn, total, text, drawn[-1].finish_reason)))

        async def chunks():
            drawn: list[SampledPiece] = []
            async for piece in pieces:
                drawn.append(piece)
                total = sum(len(one.token_ids) for one in drawn)
                shown = [piece] if "incremental" in self.kind else drawn
                yield reply(shown, total, "".join(one.text for one in shown), piece.finish_reason)

        return self._events(chunks())

    def _events(self, chunks: Any) -> Response:
        async def events():
            first = True
            async for chunk in chunks:
                spoilt = self.spoils(chunk)
                if spoilt is None:  # the connection ends here
                    return
                yield b"data: " + json.dumps(spoilt).encode() + b"\n\n"
                while first and self.holds is not None and not self.holds.is_set():
                    await asyncio.sleep(0.01)
                first = False
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


_TOKEN_PATHS = ("/generate", "/v1/completions")


def _together(pieces: list[SampledPiece]) -> tuple[list[int], list[float], str]:
    ids = [token for piece in pieces for token in piece.token_ids]
    return ids, [value for piece in pieces for value in piece.logprobs], "".join(piece.text for piece in pieces)


def _pairs(piece: SampledPiece) -> Iterator[tuple[int, float]]:
    return zip(piece.token_ids, piece.logprobs, strict=True)
