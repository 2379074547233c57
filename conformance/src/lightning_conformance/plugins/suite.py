"""What every plugin promises, as a test class: write the programs of `SCENARIOS` and `REPLAYS`, inherit the rest.

```python
class TestMine(PluginConformance):
    framework = "mine"
    unsupported = {"choices": "the framework asks for one choice"}

    def patched(self):
        return [(mine.Client, "request")]

    def one_agent(self, url):
        return mine.Agent("writer", instructions("writer"), model=MODEL, base_url=url).run(PROMPTS["one_agent"])
    ...
```
Write one more program for each kind of model and of listener that the framework has, with a name that starts with
`heard_by_`: a program in which the user's own callbacks, handlers or middleware listen, and which returns what they
heard. Each docstring ends with what to do if the test fails.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from lightning_conformance.plugins.harmless import HarmlessPromises
from lightning_conformance.plugins.program import (
    AGENTS,
    MODEL,
    PATIENCE_S,
    PROMPTS,
    SCENARIOS,
    SECRET,
    TIMEOUT_S,
    Recording,
    instructions,
    record,
    run,
    span_of,
    user_environment,
)
from lightning_conformance.plugins.recorded import RecordedPromises, each_scenario
from lightning_conformance.plugins.replayed import REPLAY_PROMPTS, REPLAYS, ReplayPromises, write_note
from lightning_conformance.plugins.script import agent_of
from lightning_conformance.plugins.server import ReceivedRequest, ScriptedServer
from lightning_conformance.plugins.threads import at_once
from lightning_spans import Attempt, agent, attach, open_store, use_attempt
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Span

__all__ = [
    "MODEL", "PROMPTS", "REPLAYS", "REPLAY_PROMPTS", "SCENARIOS", "TIMEOUT_S", "PluginConformance", "instructions",
    "write_note",
]  # fmt: skip

_HEARD: Final = "heard_by_"


class PluginConformance(RecordedPromises, ReplayPromises, HarmlessPromises):
    """Base class of a plugin's tests: inherit it in the test file.

    Attributes:
        framework: the plugin's name, as given to `attach()`.
        unsupported: scenarios that the framework cannot do, each with the reason.
        overrides: inherited tests that are replaced, each with the reason.
        tracers: the tracers to run the tests with. A plugin does not see the tracer, so one is enough. Add "otel" if
            the framework itself uses OpenTelemetry.
    """

    framework: ClassVar[str]
    unsupported: ClassVar[dict[str, str]] = {}
    overrides: ClassVar[dict[str, str]] = {}
    tracers: ClassVar[Sequence[str]] = ("embedded",)
    _recordings: ClassVar[dict[tuple[str, str | None], Recording]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._recordings = {}
        replaced = [name for name in vars(cls) if name.startswith("test_") and hasattr(PluginConformance, name)]
        for name in replaced:
            if not cls.overrides.get(name):
                raise TypeError(f"{cls.__name__}.{name} replaces a promise: say why in `overrides[{name!r}]`.")
        for name in SCENARIOS:
            if not callable(getattr(cls, name, None)) and not cls.unsupported.get(name):
                raise TypeError(f"{cls.__name__} has no program {name!r}, and `unsupported` gives no reason for that.")
        if not cls._listener_names():
            raise TypeError(f"{cls.__name__} has no program whose name starts with {_HEARD!r}: see this module.")
        for name in {*cls.unsupported} - {*SCENARIOS, *REPLAYS}:
            raise TypeError(f"{cls.__name__}.unsupported: there is no scenario {name!r}.")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that takes a tracer with each of `tracers`, and compare them if there are several."""
        if "heard_by" in metafunc.fixturenames:
            metafunc.parametrize("heard_by", self._listener_names())
        if "tracer" in metafunc.fixturenames:
            metafunc.parametrize("tracer", self.tracers)
        if metafunc.function.__name__ == "test_both_tracers_give_the_same_rows":
            metafunc.parametrize("scenario", SCENARIOS if len(self.tracers) > 1 else [])

    @classmethod
    def _listener_names(cls) -> list[str]:
        return [name for name in dir(cls) if name.startswith(_HEARD)]

    def patched(self) -> Sequence[tuple[object, str]]:
        """Return what the plugin patches, as owner and attribute; empty if it uses only public hooks."""
        return []

    def program(self, scenario: str) -> Callable[[str], Any]:
        """Return the program of a scenario, or skip the test."""
        if scenario in self.unsupported:
            pytest.skip(f"{self.framework}: {self.unsupported[scenario]}")
        if scenario in REPLAYS and not hasattr(self, scenario):
            pytest.skip(f"{self.framework}: it has no program {scenario!r}, so nobody knows whether its tools replay")
        program: Callable[[str], Any] = getattr(self, scenario)
        return program

    @pytest.fixture
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the folder of the runs' stores; not `tmp_path`, because its names grow with those of the tests."""
        return tmp_path_factory.mktemp("conformance")

    @pytest.fixture
    def recorded(self, folder: Path) -> Callable[[str, str | None], Recording]:
        """Return a function that runs a scenario, once for each tracer; None runs it without attaching."""

        def give(scenario: str, tracer: str | None) -> Recording:
            program = self.program(scenario)
            if (scenario, tracer) not in self._recordings:
                place = folder / f"{scenario}-{tracer}"
                self._recordings[scenario, tracer] = record(program, place, framework=self.framework, tracer=tracer)
            return self._recordings[scenario, tracer]

        return give

    # What the agent sees

    @each_scenario
    def test_output_is_the_same_attached_or_not(self, scenario: str, tracer: str, recorded: Any) -> None:
        """The program has the same output and sends the same requests, except for the one header that joins them.

        If it fails: look for an event handler that changes what it is given, or raises.
        """
        attached, alone = recorded(scenario, tracer), recorded(scenario, None)
        assert attached.output == alone.output
        assert sorted(map(_request_text, attached.requests)) == sorted(map(_request_text, alone.requests))

    def test_the_users_callbacks_hear_what_they_heard(self, heard_by: str, tracer: str, recorded: Any) -> None:
        """The user's own callbacks, handlers and middleware get the same events, attached or not.

        If it fails: the plugin replaces the framework's handlers instead of adding its own, or the framework treats
        handlers differently if one of them is ours.
        """
        assert recorded(heard_by, None).output
        assert recorded(heard_by, tracer).output == recorded(heard_by, None).output

    # Attach and detach

    def test_attach_twice_is_attach_once(self, tracer: str, tmp_path: Path) -> None:
        """The second `attach()` returns the first attachment, and every call is still one span.

        If it fails: add the plugin's handler only once.
        """
        with user_environment(tmp_path), ScriptedServer() as server:
            with attach(self.framework, store=str(tmp_path / "traces.db"), tracer=tracer) as first:
                assert attach(self.framework, store=str(tmp_path / "traces.db"), tracer=tracer) is first
                run(self.program("one_agent"), server.url)
                first.flush(PATIENCE_S)
            assert len(_spans_in(tmp_path / "traces.db", names.CHAT)) == len(server.requests)

    def test_detach_stops_recording_and_restores_everything(self, tracer: str, tmp_path: Path) -> None:
        """After `detach()` every patched attribute is the original object, and nothing is recorded.

        If it fails: the callable that `lightning_attach` returns must undo everything that it did.
        """
        before = [inspect.getattr_static(owner, name) for owner, name in self.patched()]
        with user_environment(tmp_path), ScriptedServer() as server:
            with attach(self.framework, store=str(tmp_path / "traces.db"), tracer=tracer) as attachment:
                during = [inspect.getattr_static(owner, name) for owner, name in self.patched()]
                run(self.program("one_agent"), server.url)
                attachment.flush(PATIENCE_S)
            after = [inspect.getattr_static(owner, name) for owner, name in self.patched()]
            recorded = len(_spans_in(tmp_path / "traces.db"))
            run(self.program("one_agent"), server.url)
            assert len(_spans_in(tmp_path / "traces.db")) == recorded > 0
            assert "traceparent" not in server.requests[-1].headers
        assert all(now is not then for now, then in zip(during, before, strict=True))
        assert all(now is then for now, then in zip(after, before, strict=True))

    # Attempts and routing

    def test_attempts_never_mix_across_threads(self, tracer: str, tmp_path: Path) -> None:
        """Concurrent attempts, each in a thread, keep their spans separate.

        If it fails: look for something that is kept for the process but belongs to the OTel Context.
        """
        programs = [self.program(name) for name in ("tool_call", "several_agents") if name not in self.unsupported]

        def work(url: str) -> None:
            for program in programs:
                program(url)

        def start(server: ScriptedServer) -> None:
            at_once([partial(_in_attempt, number, work, server.url_of(f"m{number}")) for number in range(4)])

        self._check_attempts(start, tracer, tmp_path)

    def test_attempts_never_mix_across_tasks(self, tracer: str, tmp_path: Path) -> None:
        """Concurrent attempts in one event loop keep their spans separate.

        If it fails: look for a context that was entered in one task and left in another.
        """
        program = self.program("asynchronous")

        async def work(number: int, server: ScriptedServer) -> None:
            with use_attempt(Attempt(f"r{number}", f"a{number}")):
                await program(server.url_of(f"m{number}"))

        async def gather(server: ScriptedServer) -> None:
            await asyncio.gather(*(work(number, server) for number in range(4)))

        self._check_attempts(lambda server: asyncio.run(gather(server)), tracer, tmp_path)

    def test_what_comes_after_a_run_is_no_part_of_it(self, tracer: str, tmp_path: Path) -> None:
        """An attempt and an agent that begin after a run, in the task that awaited it, are not part of the run.

        If it fails: the run's end came in a copy of the context, and what the run entered is still current. Begin from
        `settle_context()`, and enter what the framework reports by start and end as a `Scope`.
        """
        program = self.program("awaited")

        async def one_after_another(server: ScriptedServer) -> None:
            await program(server.url_of("m0"))
            with use_attempt(Attempt("r1", "a1")):
                await program(server.url_of("m1"))
                with use_attempt(Attempt("r2", "a2")):
                    await program(server.url_of("m2"))
                with agent("judge"):
                    pass

        with user_environment(tmp_path), ScriptedServer() as server:
            with attach(self.framework, store=str(tmp_path / "traces.db"), tracer=tracer) as attachment:
                asyncio.run(one_after_another(server))
                attachment.flush(PATIENCE_S)
            spans = {span.span_id: span for span in _spans_in(tmp_path / "traces.db")}
            for request in server.requests:
                expected = {"m0": None, "m1": "a1", "m2": "a2"}[request.path.split("/")[1]]
                assert spans[span_of(request)].attempt_id == expected
        (judge,) = [span for span in spans.values() if span.name == "judge"]
        assert (judge.parent_id, judge.attempt_id, judge.attributes[names.AGENT_PATH]) == (None, "a1", "judge")
        traces = {(span.trace_id, span.attempt_id) for span in spans.values()}
        assert len(traces) == len({trace_id for trace_id, _ in traces})

    def _check_attempts(self, start: Callable[[ScriptedServer], None], tracer: str, folder: Path) -> None:
        with user_environment(folder), ScriptedServer() as server:
            with attach(self.framework, store=str(folder / "traces.db"), tracer=tracer) as attachment:
                start(server)
                attachment.flush(PATIENCE_S)
            spans = {span.span_id: span for span in _spans_in(folder / "traces.db")}
            assert {request.path.split("/")[1] for request in server.requests} == {"m0", "m1", "m2", "m3"}
            for request in server.requests:
                assert spans[span_of(request)].attempt_id == f"a{request.path[2]}"
        by_trace: dict[str, set[tuple[str | None, str | None]]] = {}
        for span in spans.values():
            by_trace.setdefault(span.trace_id, set()).add((span.rollout_id, span.attempt_id))
        assert all(len(attempts) == 1 for attempts in by_trace.values())

    @pytest.mark.parametrize("scenario", ["several_agents", "asynchronous"])
    def test_only_the_named_are_rerouted(self, scenario: str, tracer: str, tmp_path: Path) -> None:
        """Calls of the named agents go to the policy under the attempt's key; those of other agents are not rerouted.

        If it fails: look at `span.agent` when the request is built; None is never rerouted, and `writer` is neither
        `rewriter` nor `writer_2`.
        """
        program = self.program(scenario)
        with user_environment(tmp_path), ScriptedServer() as origin, ScriptedServer() as policy:
            attempt = Attempt("r", "a", endpoint=policy.base, key="attempt-key", agents=("writer",))
            attachment = attach(self.framework, store=str(tmp_path / "own.db"), tracer=tracer)
            with attachment, use_attempt(attempt):
                run(program, origin.url)
                attachment.flush(PATIENCE_S)
        assert {agent_of(request.body or {}) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body or {}) for request in origin.requests} == AGENTS[scenario] - {"writer"}
        for request in policy.requests:
            assert request.path in {"/v1/chat/completions", "/v1/responses"}
            assert (request.body or {})["model"] == "policy"
            assert request.headers["authorization"] == "Bearer attempt-key"
            assert request.headers["x-lightning-agent"] == "writer"
        for request in origin.requests:
            assert SECRET in request.headers["authorization"]
            assert "x-lightning-agent" not in request.headers
        chats = {span.span_id: span for span in policy.spans if span.operation == names.CHAT}
        assert {span_of(request) for request in [*policy.requests, *origin.requests]} == set(chats)
        assert {bool(span.attributes.get(names.REROUTED)) for span in chats.values()} == {True, False}
        assert all(span.attempt_id == "a" for span in policy.spans)

    @pytest.mark.parametrize("scenario", ["several_agents", "streaming", "responses", "tool_call"])
    def test_the_users_credentials_never_leave(self, scenario: str, tracer: str, tmp_path: Path) -> None:
        """The training side receives no key, organisation or header of the user, neither in calls nor in spans.

        If it fails: build a rerouted call from a list of what may be forwarded, not by removing things.
        """
        program = self.program(scenario)
        with user_environment(tmp_path), ScriptedServer() as origin, ScriptedServer() as policy:
            attempt = Attempt("r", "a", endpoint=policy.base, key="attempt-key", agents=("*",))
            attachment = attach(self.framework, store=str(tmp_path / "own.db"), tracer=tracer)
            with attachment, use_attempt(attempt):
                run(program, origin.url)
                attachment.flush(PATIENCE_S)
        assert policy.requests
        assert policy.traces
        assert not origin.requests
        for request in [*policy.requests, *policy.traces]:
            assert SECRET not in request.path
            assert not [name for name, value in request.headers.items() if SECRET in value]
            assert SECRET.encode() not in request.raw


def _in_attempt(number: int, work: Callable[[str], None], url: str) -> None:
    with use_attempt(Attempt(f"r{number}", f"a{number}")):
        work(url)


def _spans_in(path: Path, operation: str | None = None) -> list[Span]:
    store = open_store(str(path))
    try:
        return [span for span in store.spans() if operation in {None, span.operation}]
    finally:
        store.close()


def _request_text(request: ReceivedRequest) -> str:
    headers = {k: v for k, v in request.headers.items() if k not in {"traceparent", "host"}}
    return json.dumps([request.path, request.body, headers], sort_keys=True)
