"""What recording costs a program: the openai client against a transport in the same process, attached and not.

The program attaches once; then the plugin is bound and unbound in turns of a few calls each, so that a machine that is
busy for a while slows both alike. Two clocks: the thread that makes the calls, and the whole process until every span
is in the store. A call of a real program also waits for its model; here nothing waits: only the recording is left.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure
from records import SYSTEM

import lightning_spans
from lightning_spans import hookimpl, plugins
from lightning_spans.attach import live_recorder

TURNS = 150
FEW, MANY = 5, 25  # calls of one turn
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
    for number in range(20)
]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"


CASES = {  # what the table says: framework, call
    "openai": ("openai", "chat"),
    "openai, 20 streamed events": ("openai", "stream"),
    "LangChain's ChatOpenAI": ("langchain", "langchain_chat"),
}


class Nothing:
    """A plugin that binds nothing: attaching it opens what all plugins share."""

    @hookimpl
    def lightning_attach(self, framework: str) -> Callable[[], None] | None:
        return (lambda: None) if framework == "nothing" else None


def measure() -> list[Figure]:
    plugins.register(Nothing(), "nothing")
    plugins.load("openai")
    plugins.load("langchain")
    cases = {what: (framework, client_call(call)) for what, (framework, call) in CASES.items()}
    return [
        figure
        for what, (framework, call) in cases.items()
        for tracer in TRACERS
        for figure in cost(f"{what}, {tracer}", framework, call, tracer)
    ]


def cost(what: str, framework: str, call: Callable[[], None], tracer: str) -> list[Figure]:
    """Difference between a call with the plugin bound and one without it, by each clock."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_SPOOL"] = str(Path(folder) / "spool")
        store = str(Path(folder) / "bench.db")
        with lightning_spans.attach("nothing", tracer=tracer, store=store) as attachment:

            def in_thread(calls: int) -> float:
                return seconds(time.thread_time, call, calls)

            def in_process(calls: int) -> float:
                return seconds(time.process_time, call, calls, attachment.flush)

            turns(framework, in_thread, 10, FEW)  # warms up
            thread, bare = turns(framework, in_thread, TURNS, FEW)
            attachment.flush()
            process, _ = turns(framework, in_process, TURNS // 10, MANY)
        kept = sum(span.operation == "chat" for span in lightning_spans.open_store(store).spans())
    made = (TURNS + 10) * FEW + TURNS // 10 * MANY
    if kept != made:
        raise RuntimeError(f"{kept} chat spans are in the store after {made} calls")
    how = f"{TURNS} turns of {FEW} calls; a bare call costs {bare:.0f} µs"
    whole = f"the whole process; {TURNS // 10} turns of {MANY} calls and a flush"
    return [
        Figure(what=f"{what}: agent's thread", value=thread, unit="µs CPU", goal=150, others=OTHERS, note=how),
        Figure(what=f"{what}: until in the store", value=process, unit="µs CPU", note=whole),
    ]


def turns(framework: str, clock: Callable[[int], float], count: int, calls: int) -> tuple[float, float]:
    """Medians, in µs a call, of what recording adds to the turn before it, and of a bare call."""
    bare, added = [], []
    for _ in range(count):
        bare.append(1e6 * clock(calls) / calls)
        undo = plugins.manager().hook.lightning_attach(framework=framework, recorder=live_recorder())
        added.append(1e6 * clock(calls) / calls - bare[-1])
        undo()
    return statistics.median(added), statistics.median(bare)


def seconds(
    clock: Callable[[], float], call: Callable[[], None], calls: int, then: Callable[[], object] | None = None
) -> float:
    begin = clock()
    for _ in range(calls):
        call()
    if then is not None:
        then()
    return clock() - begin


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
