"""CPU that the gateway spends on a request, beside bare relays with the same server and the same client.

There are two of them: one is written with FastAPI, as the gateway is, the other has no framework at all. Three
processes: a scripted model server, the one measured, and a client. Where BENCH_LITELLM_PYTHON names an
environment with litellm's proxy, that is measured after them. The replies are 10 KB and 51 KB, whole and as streams,
with the message's tokens and their log-probabilities, as vLLM sends them when asked; each call is on disk before its
reply ends. The model thinks for a while, so that as many are under way at once as the client says, and a stream comes
token by token.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests_path  # noqa: F401 - for fakes.py
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from figures import Figure, choose_size

LITELLM = os.environ.get("BENCH_LITELLM_PYTHON", "")
PROXY = "litellm's proxy of PyPI in its own environment, which records nothing"
REQUESTS = choose_size(300, 16)
ROUNDS = choose_size(3, 1)
AT_ONCE = int(os.environ.get("BENCH_AT_ONCE", choose_size("64", "8")))
THINKS_S = choose_size(0.1, 0.0)  # the model, before it answers
TOKEN_S = choose_size(0.02, 0.0)  # and between two tokens of a stream


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: tokens in a reply, so many bytes of it, and the goal in ms."""

    size: str
    tokens: int
    goal: float
    stream: bool = False

    @property
    def name(self) -> str:
        return f"{self.size} stream" if self.stream else self.size


CASES = [Case("10 KB", 67, 0.5), Case("51 KB", 390, 1.0), Case("10 KB", 28, 0.5, True), Case("51 KB", 146, 1.0, True)]
CASES = choose_size(CASES, [CASES[0], CASES[2]])
OTHERS = {
    "10 KB": "2.1-3.6 ms (agent-lightning 1.0); 3.0-4.3 ms (rLLM)",
    "51 KB": "4.7-5.3 ms (agent-lightning 1.0); 4.0-7.9 ms (rLLM)",
}


def measure() -> list[Figure]:
    return [figure for case in CASES for figure in _measure_case(case)]


def _measure_case(case: Case) -> list[Figure]:
    with (
        _Process("upstream", str(case.tokens)) as upstream,
        _Process("relay", upstream.url) as relay,
        _Process("fastapi", upstream.url) as fastapi,
        _Process("gateway", upstream.url) as gateway,
    ):
        servers = (relay, fastapi, gateway)
        for server in servers:
            _client(server, AT_ONCE, case)
        rounds = [[_cpu_ms(server, case) for server in servers]]
        start_mib = gateway.usage()["rss_mib"]  # by now caches and buffers have their size
        rounds += [[_cpu_ms(server, case) for server in servers] for _ in range(ROUNDS - 1)]  # noise hits all
        grown_mib = gateway.usage()["rss_mib"] - start_mib
        theirs = _beside(upstream, case) if LITELLM and not case.stream else None
    bare, framework, whole = (statistics.median(times) for times in zip(*rounds, strict=True))
    above_bare, above = (statistics.median(times[-1] - times[at] for times in rounds) for at in (0, 1))
    sent = len(reply(case.tokens)) if not case.stream else sum(map(len, events(case.tokens)))
    how = f"{ROUNDS} x {REQUESTS} calls, {AT_ONCE} at once, {sent / 1000:.0f} KB from upstream"
    others = OTHERS[case.size] if not case.stream else ""
    beside = Figure(what=f"litellm's proxy, {case.name}", value=theirs, unit="ms", note=PROXY) if theirs else None
    grown = f"over the last {(ROUNDS - 1) * REQUESTS} calls"
    return [
        Figure(what=f"gateway, {case.name}", value=whole, unit="ms", others=others, note=f"{how}, each on disk"),
        Figure(
            what=f"bare relay, {case.name}", value=bare, unit="ms", note="uvicorn and aiohttp, nothing read or kept"
        ),
        Figure(what=f"FastAPI relay, {case.name}", value=framework, unit="ms", note="the same, written with FastAPI"),
        *([beside] if beside else []),
        Figure(what=f"above the FastAPI relay, {case.name}", value=above, unit="ms", goal=case.goal, others=others),
        Figure(what=f"above the bare relay, {case.name}", value=above_bare, unit="ms"),
        Figure(what=f"memory grown, {case.name}", value=grown_mib, unit="MiB", note=grown),
    ]


def _beside(upstream: _Process, case: Case) -> float:
    """Return the milliseconds of CPU that litellm's proxy spends on a request."""
    with _LiteLlm(upstream.url) as proxy:
        _client(proxy, AT_ONCE, case)
        return statistics.median(_cpu_ms(proxy, case, REQUESTS // 3) for _ in range(2))


def _cpu_ms(server: _Process, case: Case, number: int = REQUESTS) -> float:
    """Return the milliseconds of CPU that a server spends on a request."""
    before = server.usage()["cpu_s"]
    _client(server, number, case)
    return (server.usage()["cpu_s"] - before) / number * 1000


def reply(tokens: int) -> bytes:
    """A chat completion as vLLM sends it with token ids and log-probabilities."""
    words = [f" word{number:03d}" for number in range(tokens)]
    content = [
        {"token": word, "logprob": -0.123456789 * (number % 9), "bytes": list(word.encode()), "top_logprobs": []}
        for number, word in enumerate(words)
    ]
    message = {"role": "assistant", "content": "".join(words), "refusal": None, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
    choice["token_ids"] = list(range(1000, 1000 + tokens))
    usage = {"prompt_tokens": 200, "completion_tokens": tokens, "total_tokens": 200 + tokens}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return json.dumps({**head, "choices": [choice], "prompt_token_ids": list(range(200))}).encode()


def events(tokens: int) -> list[bytes]:
    """The same as a stream, a token an event."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    found = [{**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    found[0]["prompt_token_ids"] = list(range(200))
    for number in range(tokens):
        word = f" word{number:03d}"
        shown = {
            "token": word,
            "logprob": -0.123456789 * (number % 9),
            "bytes": list(word.encode()),
            "top_logprobs": [],
        }
        choice = {"index": 0, "delta": {"content": word}, "logprobs": {"content": [shown]}, "finish_reason": None}
        found.append({**head, "choices": [{**choice, "token_ids": [1000 + number]}]})
    found[-1]["choices"][0]["finish_reason"] = "stop"
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in found), b"data: [DONE]\n\n"]


REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are a careful assistant. " * 20},
        {"role": "user", "content": "What is the answer to this question? " * 20},
    ],
    "temperature": 1.0,
}


def _client(server: _Process, number: int, case: Case) -> None:
    how = "stream" if case.stream else "whole"
    command = [sys.executable, __file__, "client", server.url, server.key, str(number), how]
    subprocess.run(command, check=True, capture_output=True)


class _Process:
    """A server of a file in a process of its own."""

    file = __file__

    def __init__(self, kind: str, argument: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, self.file, kind, argument, self._folder.name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = self._ask(None)
        self.url, self.key = told["url"], told["key"]

    def usage(self) -> dict[str, float]:
        return self._ask("usage")

    def _ask(self, line: str | None) -> dict[str, Any]:
        if line is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the {self._process.args} did not start")
        return json.loads(answer)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()
        self._folder.cleanup()


class _LiteLlm(_Process):
    """litellm's proxy in a process of its own, out of its own environment, with nothing turned on."""

    def __init__(self, upstream: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = Path(self._folder.name) / "config.yaml"
        served = {"model": "openai/m", "api_base": f"{upstream}/v1", "api_key": "none"}
        self.key = f"sk-{secrets.token_hex(24)}"  # it starts with no weaker one
        models = [{"model_name": "m", "litellm_params": served}]
        config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": self.key}}))
        program = Path(LITELLM).with_name("litellm")
        command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
        env = {**os.environ, **quiet}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        self.url = f"http://127.0.0.1:{port}"
        self._wait(time.monotonic() + 180)

    def _wait(self, until: float) -> None:
        import httpx

        while True:
            try:
                if httpx.get(f"{self.url}/health/liveliness", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(1)
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("litellm's proxy did not start")

    def usage(self) -> dict[str, float]:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return {"cpu_s": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")}

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()


def serve(kind: str, argument: str, folder: str) -> None:
    """A child's part: serve until the input ends; tell the CPU and memory used for each line read."""
    from lightning_trainer.gateway.http.serving import ServerThread

    key = "none"
    if kind == "upstream":
        app: Any = scripted_app(int(argument))
    elif kind == "relay":
        app = relay(argument)
    elif kind == "fastapi":
        app = fastapi_relay(argument)
    else:
        app, key = gateway(argument, Path(folder))
    with_thread = ServerThread(app)
    tell(with_thread.start(), key)
    with_thread.stop()


def tell(url: str, key: str) -> None:
    """Say where this process serves, and for each line read what it has used, until the input ends."""
    print(json.dumps({"url": url, "key": key}), flush=True)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        rss_kib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024
        print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "rss_mib": rss_kib / 1024}), flush=True)


def scripted_app(tokens: int) -> Any:
    models = b'{"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}'
    body, pieces = reply(tokens), events(tokens)

    async def answer(scope: Any, sent: bytes) -> AsyncIterator[bytes]:
        if scope["method"] != "POST":
            yield models
            return
        await asyncio.sleep(THINKS_S)
        if not json.loads(sent).get("stream"):
            yield body
            return
        for piece in pieces:
            yield piece
            await asyncio.sleep(TOKEN_S)

    return _asgi(answer)


def relay(upstream: str) -> Any:
    return _asgi(*forwarding(upstream))


def fastapi_relay(upstream: str) -> Any:
    forward, close = forwarding(upstream)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        sent = await request.body()
        if b'"stream"' in sent:
            return StreamingResponse(forward(request.scope, sent), media_type="text/event-stream")
        return Response(b"".join([part async for part in forward(request.scope, sent)]), media_type="application/json")

    return app


def forwarding(upstream: str) -> tuple[Any, Any]:
    """What a relay does with a request, and how it lets go of its connections."""
    import aiohttp

    session: list[aiohttp.ClientSession] = []

    async def forward(scope: Any, sent: bytes) -> AsyncIterator[bytes]:
        if not session:
            connector = aiohttp.TCPConnector(limit=0)
            session.append(aiohttp.ClientSession(connector=connector, headers={"content-type": "application/json"}))
        async with session[0].post(f"{upstream}/v1/chat/completions", data=sent) as response:
            if b'"stream"' not in sent:
                yield await response.read()
                return
            async for part in response.content.iter_any():
                yield part

    async def close() -> None:
        for one in session:
            await one.close()

    return forward, close


def gateway(upstream: str, folder: Path) -> tuple[Any, str]:
    from lightning_spans.store import open_store
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.gateway.upstream.upstream import Upstream
    from support.fakes import Attempts, run_attempt

    keys = Keys.fresh()
    store = open_store(str(folder / "bench.db"))
    app = create_app(Attempts(store), keys=keys, upstreams=[Upstream("m", f"{upstream}/v1")])
    run_attempt(app, "a")
    return app, keys.issue("attempt", rollout_id="r", attempt_id="a", fence=1)


def _asgi(answer: Any, close: Any = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            if close is not None:
                await close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        sent = b""
        while (message := await receive()).get("more_body"):
            sent += message["body"]
        sent += message["body"]
        if b'"stream"' in sent:
            await _send_stream(answer(scope, sent), send)
            return
        body = b"".join([part async for part in answer(scope, sent)])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def _send_stream(parts: AsyncIterator[bytes], send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def ask(url: str, key: str, number: int, *, stream: bool) -> None:
    """The client's part: so many requests, some at once."""
    import aiohttp

    headers = {"authorization": f"Bearer {key}", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    body = {**REQUEST, "stream": True} if stream else REQUEST

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=AT_ONCE)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as client:

            async def one() -> None:
                async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                    answer = await response.read()
                if response.status != 200 or (stream and b"[DONE]" not in answer):
                    raise RuntimeError(f"{response.status}: {answer[-300:]!r}")

            await asyncio.gather(*(one() for _ in range(number)))

    asyncio.run(main())


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind == "client":
        ask(sys.argv[2], sys.argv[3], int(sys.argv[4]), stream=sys.argv[5] == "stream")
    elif kind in {"upstream", "relay", "fastapi", "gateway"}:
        serve(*sys.argv[1:4])
    else:
        begin = time.monotonic()
        for figure in measure():
            print(f"{figure.what:28} {figure.value:8.3f} {figure.unit}")
        print(f"{time.monotonic() - begin:.0f} s")
