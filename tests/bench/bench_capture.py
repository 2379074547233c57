"""What recording costs a program: the openai client against a transport in the same process, attached and not.

Three processes, bare and with each tracer, that take turns of a few calls each: a machine that is busy for a moment
slows them alike. Two clocks: the thread that makes the calls, and the whole process until every span is in the store.
A call of a real program also waits for its model; here nothing waits, so that only the recording is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from figures import Figure
from records import SYSTEM

TURNS = 60
CALLS = 40  # of one turn
TRACERS = ("otel", "embedded")
OTHERS = "2,400 µs wall (agent-lightning 0.3); openinference 250-520 µs"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 12 + 7?"}]
TOOL = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Evaluate.", "parameters": TOOL}}]
REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_790_000_000,
    "model": "policy",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Answer: 19. " * 20}}
    ],
    "usage": {"prompt_tokens": 120, "completion_tokens": 60, "total_tokens": 180},
}
EVENTS = [
    {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "policy",
        "choices": [{"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": None}],
    }
    for number in range(60)
]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"


CASES = {  # what the table says: framework, call
    "openai": ("openai", "chat"),
    "openai, 60 streamed events": ("openai", "stream"),
    "LangChain's ChatOpenAI": ("langchain", "langchain_chat"),
}


def measure() -> list[Figure]:
    return [figure for what, (framework, call) in CASES.items() for figure in cost(what, framework, call)]


def cost(what: str, framework: str, call: str) -> list[Figure]:
    """Let the three take turns, and give what each takes longer than the bare one."""
    thread: dict[str, list[float]] = {tracer: [] for tracer in ("none", *TRACERS)}
    process: dict[str, list[float]] = {tracer: [] for tracer in ("none", *TRACERS)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        children = {
            tracer: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, framework, call, tracer, str(Path(folder) / tracer)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for tracer in thread
        }
        for turn in range(-5, TURNS):  # the first ones warm up
            for tracer, child in children.items():
                child.stdin.write("go\n")
                child.stdin.flush()
                seconds = [float(part) / CALLS for part in child.stdout.readline().split()]
                if turn >= 0:
                    thread[tracer].append(seconds[0])
                    process[tracer].append(seconds[1])
        for child in children.values():
            child.stdin.close()
            if child.wait() != 0:
                raise RuntimeError(f"a process of {what} failed")
    how = f"{TURNS} turns of {CALLS} calls; a bare call costs {1e6 * undisturbed(thread['none']):.0f} µs"
    found = []
    for tracer in TRACERS:
        name = f"{what}, {tracer}"
        found += [
            Figure(
                what=f"{name}: the agent's thread",
                value=1e6 * added(thread, tracer),
                unit="µs CPU",
                goal=150,
                others=OTHERS,
                note=how,
            ),
            Figure(
                what=f"{name}: until it is in the store",
                value=1e6 * added(process, tracer),
                unit="µs CPU",
                note="the whole process, a flush after each turn",
            ),
        ]
    return found


def added(seconds: dict[str, list[float]], tracer: str) -> float:
    return undisturbed(seconds[tracer]) - undisturbed(seconds["none"])


def undisturbed(seconds: list[float]) -> float:
    """The first decile: what else the machine does only ever adds to a turn, through its caches."""
    return statistics.quantiles(seconds, n=10)[0]


def child(framework: str, call: str, tracer: str, folder: str) -> None:
    """A process of the three: make some calls whenever a line comes, and tell the CPU seconds of thread and process."""
    import lightning_spans

    make_call, made, attachment = client_call(call), 0, None
    store = str(Path(folder) / "bench.db")
    if tracer != "none":
        Path(folder).mkdir()
        os.environ["LIGHTNING_SPOOL"] = str(Path(folder) / "spool")
        attachment = lightning_spans.attach(framework, tracer=tracer, store=store)
    for _ in sys.stdin:
        begin = time.thread_time(), time.process_time()
        for _ in range(CALLS):
            make_call()
        in_thread, made = time.thread_time() - begin[0], made + CALLS
        if attachment is not None and not attachment.flush():
            raise RuntimeError("the spans were not delivered in time")
        print(in_thread, time.process_time() - begin[1], flush=True)
    if attachment is not None:
        attachment.detach()
        kept = sum(span.operation == "chat" for span in lightning_spans.open_store(store).spans())
        if kept != made:
            raise RuntimeError(f"{kept} chat spans are in the store after {made} calls")


def client_call(name: str) -> Callable[[], None]:
    """Make a client whose transport answers in this process, and give one call of it."""
    import openai

    library = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])  # httpx or httpx2

    def answer(request: object) -> object:
        if b'"stream":true' in request.content:
            return library.Response(200, headers={"content-type": "text/event-stream"}, content=STREAM)
        return library.Response(200, json=REPLY)

    http_client = openai.DefaultHttpxClient(transport=library.MockTransport(answer))
    given = {"base_url": "http://model/v1", "api_key": "none", "http_client": http_client}
    if name == "langchain_chat":
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model="policy", **given).bind_tools(TOOLS)
        messages = [(message["role"], message["content"]) for message in MESSAGES]
        return lambda: model.invoke(messages)
    completions = openai.OpenAI(**given).chat.completions
    body = {"model": "policy", "messages": MESSAGES, "tools": TOOLS, "temperature": 1.0}
    if name == "stream":
        return lambda: list(completions.create(**body, stream=True))
    return lambda: completions.create(**body)


if __name__ == "__main__":
    child(*sys.argv[1:5])
