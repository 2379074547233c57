"""The small programs that a plugin's test class implements in its framework, and the recording of a run."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from lightning_conformance.plugins.server import ReceivedRequest, ScriptedServer
from lightning_spans import attach, hookimpl, hooks, open_store
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Span

# What each program does. The instructions of every agent are `instructions(NAME)`, its one message is the prompt below.
SCENARIOS: Final = {
    "one_agent": "The agent `writer` calls its model once.",
    "unnamed": "An agent without a name, with the instructions of `writer`, runs inside `with agent('writer')`.",
    "several_agents": "The agents `writer`, `rewriter` and `writer_2` run, one after the other.",
    "namesakes": "Two agents `writer` run, one of the team or agent `red`, one of the team or agent `blue`.",
    "streaming": "The agent `writer` runs; its answer is streamed and read to the end.",
    "abandoned": "The agent `writer` runs; its answer is streamed; the program reads only the first chunk.",
    "responses": "As `one_agent`, through `/responses`.",
    "responses_streaming": "As `streaming`, through `/responses`.",
    "choices": "As `one_agent`, with two requested choices (`n=2`).",
    "tool_call": "The agent `caller` runs; it has the tool `add(a: int, b: int)`, which returns the sum.",
    "parallel_tools": "As `tool_call`, but the model calls the tool twice in one answer.",
    "tool_error": "The agent `caller` runs; it has the tool `fail(reason: str)`, which raises ValueError(reason).",
    "unknown_tool": "As `tool_call`, but the model calls `subtract`, which is not there. A framework may raise then.",
    "unreadable_arguments": "As `tool_call`, but the arguments that the model gives are cut off in the middle.",
    "parallel": "The agents `left` and `right` run at the same time.",
    "nested": "The agent `boss` runs; it has the tool `ask(question: str)`, which runs the agent `writer`.",
    "asynchronous": "A coroutine: the agents `writer` and `rewriter` run at the same time, in one event loop.",
    "awaited": "A coroutine: the agent `writer` runs, and its answer is awaited in the same task.",
    "threads": "The agent `writer` runs in two threads of a pool that the program creates.",
    "retried": "The agent `writer` uses a client that retries; the first request is refused with 429.",
    "failed": "The agent `writer` uses a client that does not retry; the response is 500.",
    "slow": "The agent `writer` uses a client with a timeout of 0.2 s that does not retry; the response is late.",
    "cut": "The agent `writer` runs; its answer is streamed, and the connection breaks in the middle.",
}

_HELLO: Final = "hello there"
_ADD: Final = 'call add {"a": 2, "b": 3}'
PROMPTS: Final = dict.fromkeys(SCENARIOS, _HELLO) | {
    "abandoned": f"say {'and so on ' * 500}",  # seconds long: even on a busy machine the reader leaves before the end
    "tool_call": _ADD,
    "parallel_tools": f'{_ADD}\ncall add {{"a": 20, "b": 30}}',
    "tool_error": 'call fail {"reason": "out of order"}',
    "unknown_tool": 'call subtract {"a": 5, "b": 3}',
    "unreadable_arguments": 'call add {"a": 2, "b"',
    "parallel": "wait 0.05",
    "nested": 'call ask {"question": "hello writer"}',
    "asynchronous": "wait 0.05",
    "retried": "fail 429 1",
    "failed": "fail 500 99",
    "slow": "wait 1",
    "cut": "cut",
}
AGENTS: Final = {scenario: {"writer"} for scenario in SCENARIOS} | {
    "several_agents": {"writer", "rewriter", "writer_2"},
    "tool_call": {"caller"},
    "parallel_tools": {"caller"},
    "tool_error": {"caller"},
    "unknown_tool": {"caller"},
    "unreadable_arguments": {"caller"},
    "parallel": {"left", "right"},
    "nested": {"boss", "writer"},
    "asynchronous": {"writer", "rewriter"},
}
TEAMS: Final = {"red", "blue"}  # of `namesakes`; they may be agents that call a model too
TIMEOUT_S: Final = 0.2  # of the client of `slow`
MODEL: Final = "test-model"
PATIENCE_S: Final = 60.0  # for deliveries on a busy machine
SECRET: Final = "user-secret"  # noqa: S105 - part of everything that must never leave
ENVIRONMENT: Final = {
    "OPENAI_API_KEY": f"sk-{SECRET}",
    "OPENAI_ORG_ID": f"org-{SECRET}",
    "OPENAI_PROJECT_ID": f"proj-{SECRET}",
    "OPENAI_CUSTOM_HEADERS": f"x-user-token: {SECRET}",
}


def instructions(agent: str) -> str:
    """Return the system prompt of an agent, by which the server recognises it."""
    return f"You are {agent}."


@dataclass(frozen=True)
class Recording:
    """The recording of one run.

    Attributes:
        output: the program's output.
        requests: received by the model server, in order.
        spans: from the store; empty for a run that was not attached.
        heard: the spans that `lightning_span_ended` received, in order.
    """

    output: Any
    requests: list[ReceivedRequest]
    spans: list[Span]
    heard: list[Span]

    @property
    def chats(self) -> list[Span]:
        """The chat spans."""
        return [span for span in self.spans if span.operation == names.CHAT]

    @property
    def tools(self) -> list[Span]:
        """The tool spans."""
        return [span for span in self.spans if span.operation == names.EXECUTE_TOOL]

    def calls(self) -> Iterator[tuple[ReceivedRequest, Span]]:
        """Yield each model call with its chat span; of a call with retries, the last request."""
        last = {span_of(request): request for request in self.requests}
        for span in self.chats:
            yield last[span.span_id], span


def span_of(request: ReceivedRequest) -> str:
    """Return the span id that a request names as its parent."""
    return request.headers["traceparent"].split("-")[2]


def run(program: Callable[[str], Any], url: str) -> Any:
    """Run a program, either a function or a coroutine function, and collect the garbage that it left."""
    gc.freeze()  # so that collection covers only the program's objects
    try:
        output = asyncio.run(program(url)) if inspect.iscoroutinefunction(program) else program(url)
        for _ in range(3):  # unread streams end when they are collected
            gc.collect()
            time.sleep(0.005)
    finally:
        gc.unfreeze()
    return output


@contextmanager
def user_environment(folder: Path) -> Iterator[None]:
    """Set a user's credentials and a separate spool, and unset the variables of a runner's attempt."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROLLOUT_ID", "ATTEMPT_ID", "ENDPOINT", "KEY", "AGENTS", "MODEL", "STORE", "OTLP", "REPLAY"):
            patch.delenv(f"LIGHTNING_{name}", raising=False)
        patch.setenv("LIGHTNING_SPOOL", str(folder / "spool"))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def record(program: Callable[[str], Any], folder: Path, *, framework: str, tracer: str | None) -> Recording:
    """Run a program against its own server, attached with a tracer, or not attached if `tracer` is None."""
    folder.mkdir(parents=True, exist_ok=True)
    with user_environment(folder), ScriptedServer() as server:
        if tracer is None:
            return Recording(run(program, server.url), server.requests, [], [])
        path, heard = str(folder / "traces.db"), _SpanListener()
        hooks.register(heard, "heard")
        try:
            with attach(framework, store=path, tracer=tracer) as attachment:
                output = run(program, server.url)
                attachment.flush(PATIENCE_S)
        finally:
            hooks.unregister("heard")
        store = open_store(path)
        try:
            return Recording(output, server.requests, store.spans(), heard.spans)
        finally:
            store.close()


class _SpanListener:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    @hookimpl
    def lightning_span_ended(self, span: Span) -> None:
        self.spans.append(span)
