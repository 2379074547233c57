"""That the conformance kit goes red: for each promise, the template's framework and plugin, with one thing broken."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from tempfile import mkdtemp

import pytest

openai = pytest.importorskip("openai")

TEMPLATE = Path(__file__).parents[2] / "templates" / "plugin"
sys.path[:0] = [str(TEMPLATE), str(TEMPLATE / "src")]

from opentelemetry import context as otel_context
from test_new_framework import TestConformance as Toy

from lightning_conformance import PluginConformance
from lightning_conformance.plugins import threads
from lightning_conformance.plugins.harmless import finishes
from lightning_conformance.plugins.program import record
from lightning_conformance.plugins.threads import at_once
from lightning_new_framework import plugin
from lightning_new_framework.example import Agent
from lightning_openai import patch
from lightning_spans import Attempt, hooks
from lightning_spans.errors import ReplayEndedError
from lightning_spans.schema import spans as names

PROMISES = [name for name in dir(PluginConformance) if name.startswith("test_")]


def installed(folder):
    """Write down that the toy is installed, for the processes that tests start."""
    info = folder / "lightning_new_framework-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-new-framework\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[lightning_spans]\nnew-framework = lightning_new_framework.plugin\n")
    return folder


@pytest.fixture
def toy(tmp_path_factory, monkeypatch):
    """The toy's suite, and what its tests are given: nothing is remembered from one run to the next."""
    hooks.register(plugin, "new-framework")
    suite, folders = Toy(), tmp_path_factory
    monkeypatch.syspath_prepend(str(installed(folders.mktemp("installed"))))
    kept = {name: vars(Agent)[name] for _, name in suite.patched()}

    def recorded(scenario, tracer):
        return record(suite.program(scenario), folders.mktemp("run"), framework="new-framework", tracer=tracer)

    def check(promise, **chosen):
        method = getattr(suite, promise)
        given = {
            "recorded": recorded, "tmp_path": folders.mktemp("own"), "folder": folders.mktemp("own"),
            "tracer": "embedded", "monkeypatch": monkeypatch, **chosen,
        }  # fmt: skip
        method(**{name: given[name] for name in inspect.signature(method).parameters})

    yield check
    attaching = sys.modules["lightning_spans.record.attach"]  # some of what is broken never detaches
    attaching._attached.clear()
    attaching._close_pipeline()
    for recorder in list(patch._recorders):
        patch._unbind(recorder)
    for name, method in kept.items():
        setattr(Agent, name, method)
    hooks.unregister("new-framework")


# Each gives what takes the place of the named thing, which it is given.


def records_again(original):
    def returned(call):
        original(call)
        call._recorder.start(names.CHAT, "again").end()

    return returned


def names_nobody(original):
    return lambda self, name, context=None: original(self, "nobody", context)


def writes_its_own_request(original):
    return lambda request: '{"model": "test-model"}'


def keeps_a_part(drop):
    def broken(original):
        def body_of(response, *chunks):
            whole = json.loads(original(response, *chunks))
            drop(whole)
            return json.dumps(whole)

        return body_of

    return broken


def takes_all_for_whole(original):
    return lambda *_: True


def forgets_errors(original):
    return lambda self, span, **facts: original(self, span, **{**facts, "error": None})


def passes_over_errors(original):
    return lambda call, error: call._end(None)


def tells_twice(original):
    def begin_tool(self, *args):
        self.end(original(self, *args))
        return original(self, *args)

    return begin_tool


def takes_64_bits(original):
    def begin_tool(self, *args):
        if str(10**30) in repr(args):
            raise TypeError("Integer exceeds 64-bit range")
        return original(self, *args)

    return begin_tool


def leaves_agents_open(original):
    def end(self, span, **facts):
        if span is not None and span.operation != names.INVOKE_AGENT:
            original(self, span, **facts)

    return end


def leaves_nothing(original):
    @contextmanager
    def inside(self, span):
        with self.working(span):
            if span is not None:
                otel_context.attach(span.context)
            yield

    return inside


def enters_no_tool(original):
    @contextmanager
    def inside(self, span):
        tool = span is not None and span.operation == names.EXECUTE_TOOL
        with self.working(span) if tool else original(self, span):
            yield

    return inside


def adds_an_attribute(original):
    def end(self, span, *more):
        span.attributes["more"] = True
        return original(self, span, *more)

    return end


def keeps_what_is_no_json(original):
    return lambda self, operation, name, **more: original(self, operation, name, **more | {"attributes": {"x": (1, 2)}})


def changes_the_answer(original):
    def wrap_run(self, run):
        wrapped = original(self, run)

        async def changed(agent, prompt):
            return await wrapped(agent, prompt) + "!"

        return changed

    return wrap_run


def takes_the_observers(original):
    def wrap_run(self, run):
        wrapped = original(self, run)

        async def unobserved(agent, prompt):
            agent.observers.clear()
            return await wrapped(agent, prompt)

        return unobserved

    return wrap_run


def lets_everything_through(original):
    def raised(plugin, error, *more):
        raise error

    return raised


def tells_listeners_first(original):
    def end(self, span, **facts):
        hooks.manager().hook.lightning_span_ended(span=span)
        original(self, span, **facts)

    return end


def gives_up(original):
    def begin(self, *args, **more):
        span = original(self, *args, **more)
        self.live = self.live and span is not None
        return span

    return begin


def delivers_in_the_agents_thread(original):
    return lambda sink, span, attempt: sink._deliver(sink._route(attempt)[0], [span])


def starts_with(code):
    folder = Path(mkdtemp())
    (folder / "sitecustomize.py").write_text(code)

    def broken(original):
        def environment():
            given = original()
            return {**given, "PYTHONPATH": f"{folder}{os.pathsep}{given['PYTHONPATH']}"}

        return environment

    return broken


waits_for_ever = starts_with("from lightning_spans.record.delivery import sink\nsink.CLOSE_S = 1e6\n")
writes_nothing_down = starts_with(
    "from lightning_spans.record.delivery.journal import Journal\nJournal.write = lambda *_: None\n"
)


def drops_spans(original):
    return lambda *_: None


def knows_of_none(original):
    return type("Forgetful", (dict,), {"__contains__": lambda *_: False})()


def never_undoes(original):
    return lambda *args: original(*args) and (lambda: None)


def mixes_attempts(original):
    return lambda context=None: Attempt("r0", "a0")


def reroutes_all(original):
    return lambda recorder, span: span.attempt is not None


def takes_all_headers(original):
    def rerouted(client, options, attempt, endpoint, *, body, headers):
        copy = options.model_copy()
        copy.headers = {**headers, "X-Stainless-Key": client.api_key}
        kind = type(client) if not attempt else openai.AsyncOpenAI
        return kind(base_url=f"{attempt.endpoint}/v1", api_key=attempt.key), copy

    return rerouted


def first_choice(whole):
    del whole["choices"][1:]


def token_ids(whole):
    whole["choices"][0].pop("token_ids", None)


def runs_it_again(original):
    async def agiven_to(span):
        await original(span)

    return agiven_to


def takes_an_error_for_leave(original):
    async def agiven_to(span):
        try:
            return await original(span)
        except ReplayEndedError:
            return None

    return agiven_to


def runs_twice(original):
    async def acalled(run, *more):
        await original(run, *more)
        return await original(run, *more)

    return acalled


TRACKER = "lightning_spans.record.instrument.tracker"
RECORDER = "lightning_spans.record.recorder"

BROKEN = {
    "test_every_model_call_is_one_span": ("lightning_openai.call.ModelCall.returned", records_again, "one_agent"),
    "test_every_call_has_its_agent": (TRACKER + ".Tracker.begin_agent", names_nobody, "one_agent"),
    "test_request_and_response_are_as_sent": (
        "lightning_openai.call._decode_content", writes_its_own_request, "one_agent",
    ),
    "test_token_ids_are_kept": ("lightning_openai.call.body_of", keeps_a_part(token_ids), "one_agent"),
    "test_every_choice_is_kept": ("lightning_openai.call.body_of", keeps_a_part(first_choice), None),
    "test_namesakes_are_told_apart": (RECORDER + ".agent_path", lambda _: lambda name, _: name, None),
    "test_an_abandoned_stream_is_closed_and_marked": (
        "lightning_openai.call.is_whole", takes_all_for_whole, None,
    ),
    "test_a_failed_call_is_an_error": ("lightning_openai.call.ModelCall.failed", passes_over_errors, "failed"),
    "test_every_tool_call_is_one_span": (TRACKER + ".Tracker.begin_tool", tells_twice, "tool_call"),
    "test_integers_beyond_64_bits_are_kept": (TRACKER + ".Tracker.begin_tool", takes_64_bits, None),
    "test_a_tool_that_raises_is_an_error": (TRACKER + ".Tracker.end", forgets_errors, None),
    "test_a_tool_call_that_can_not_be_carried_out_is_an_error": (
        TRACKER + ".Tracker.end", forgets_errors, "unknown_tool",
    ),
    "test_there_are_no_orphans": (TRACKER + ".Tracker.end", leaves_agents_open, "tool_call"),
    "test_an_agent_inside_a_tool_is_under_the_tool": (
        TRACKER + ".Tracker.inside", enters_no_tool, None,
    ),
    "test_both_tracers_give_the_same_rows": (
        "lightning_spans.record.tracing.tracers.OtelTracer.end", adds_an_attribute, "one_agent",
    ),
    "test_spans_survive_json_otlp_and_the_store": (
        TRACKER + ".Tracker.begin", keeps_what_is_no_json, "one_agent",
    ),
    "test_output_is_the_same_attached_or_not": (
        "lightning_new_framework.agents.NewFrameworkAgents.wrap_run", changes_the_answer, "one_agent",
    ),
    "test_the_users_callbacks_hear_what_they_heard": (
        "lightning_new_framework.agents.NewFrameworkAgents.wrap_run", takes_the_observers, None,
    ),
    "test_a_failing_hook_harms_nothing": (RECORDER + ".SpanRecorder.end", tells_listeners_first, None),
    "test_recording_goes_on_after_a_fault": (TRACKER + ".Tracker.begin", gives_up, "tool_call"),
    "test_spans_that_can_not_be_delivered_harm_nothing": (
        "lightning_spans.record.delivery.sink.BatchSink.put", delivers_in_the_agents_thread, "tool_call",
    ),
    "test_the_process_ends_though_spans_can_not_be_delivered": (
        "lightning_conformance.plugins.harmless.child_environment", waits_for_ever, None,
    ),
    "test_no_span_is_lost_where_a_process_ends_at_once": (
        "lightning_conformance.plugins.harmless.child_environment", writes_nothing_down, None,
    ),
    "test_a_failing_event_or_sink_harms_nothing": (
        TRACKER + ".log_failure", lets_everything_through, "tool_call",
    ),
    "test_a_failing_store_harms_nothing": ("lightning_spans.record.delivery.sink.BatchSink.put", drops_spans, None),
    "test_no_tool_is_run_again_in_a_replay": ("lightning_spans.record.replay.aoutcome_for", runs_it_again, "effects"),
    "test_a_tool_that_is_to_run_in_a_replay_runs_once": (
        "lightning_new_framework.tools.arun_or_replay", runs_twice, "effects",
    ),
    "test_a_tool_that_is_not_in_the_record_is_not_run": (
        "lightning_spans.record.replay.aoutcome_for", takes_an_error_for_leave, "effects",
    ),
    "test_attach_twice_is_attach_once": ("lightning_spans.record.attach._attached", knows_of_none, None),
    "test_detach_stops_recording_and_restores_everything": (
        "lightning_new_framework.agents.replace", never_undoes, None,
    ),
    "test_attempts_never_mix_across_threads": (RECORDER + ".current_attempt", mixes_attempts, None),
    "test_attempts_never_mix_across_tasks": (RECORDER + ".current_attempt", mixes_attempts, None),
    "test_what_comes_after_a_run_is_no_part_of_it": (
        TRACKER + ".Tracker.inside", leaves_nothing, None,
    ),
    "test_only_the_named_are_rerouted": (RECORDER + ".SpanRecorder.reroutes", reroutes_all, "several_agents"),
    "test_the_users_credentials_never_leave": (
        "lightning_openai.reroute.reroute_call", takes_all_headers, "several_agents",
    ),
}  # fmt: skip


def test_there_is_something_broken_for_every_promise():
    assert set(BROKEN) == set(PROMISES)


def chosen(promise):
    given = {"broken": "SpanRecorder.start", "fault": "refuses", "heard_by": "heard_by_observers"}
    return {"scenario": BROKEN[promise][2], **given}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_that_is_kept_is_green(promise, toy):
    toy(promise, **chosen(promise))


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_that_is_broken_is_red(promise, toy, monkeypatch):
    what, broken, _ = BROKEN[promise]
    owner, _, name = what.rpartition(".")
    place = sys.modules.get(owner) or resolve_name(owner)
    monkeypatch.setattr(hooks, "notify", hooks.notify)  # one that is broken replaces it
    monkeypatch.setattr(place, name, broken(getattr(place, name)))
    if broken is waits_for_ever:
        monkeypatch.setattr("lightning_conformance.plugins.program.PATIENCE_S", 2.0)
    red = (AssertionError, KeyError, ValueError, RuntimeError, FileNotFoundError, subprocess.TimeoutExpired)
    with pytest.raises(red):
        toy(promise, **chosen(promise))


def test_what_hangs_is_told_from_what_ends(monkeypatch):
    monkeypatch.setattr("lightning_conformance.plugins.program.PATIENCE_S", 0.05)
    gate = threading.Event()
    assert not finishes(lambda: gate.wait(60) and None)
    gate.set()
    monkeypatch.setattr("lightning_conformance.plugins.program.PATIENCE_S", 60.0)
    assert finishes(lambda: None)
    with pytest.raises(ZeroDivisionError):
        finishes(lambda: 1 / 0)


def test_what_fails_in_a_thread_fails_the_test():
    done = threading.Event()
    with pytest.raises(BaseExceptionGroup) as error:
        at_once([lambda: 1 / 0, done.set])
    assert error.group_contains(ZeroDivisionError)
    assert done.is_set()  # the others ran


def test_what_stands_in_a_thread_is_told_with_its_place():
    gate = threading.Event()

    def stands_here():
        gate.wait(60)

    with pytest.raises(AssertionError, match=r"program 1 did not end(.|\n)*stands_here"):
        at_once([lambda: None, stands_here], stands_s=0.1, within_s=0.1)
    gate.set()


def test_where_a_program_stood_is_told_when_it_fails_in_the_end(monkeypatch):
    looked = threading.Event()

    def gives_up_here():
        looked.wait(60)
        raise TimeoutError

    monkeypatch.setattr(threads, "stacks", lambda real=threads.stacks: (real(), looked.set())[0])
    with pytest.raises(BaseExceptionGroup) as error:
        at_once([gives_up_here], stands_s=0.05)
    assert "gives_up_here" in "".join(error.value.__notes__)


def test_a_program_that_fails_in_one_attempt_breaks_the_promise_of_threads(toy, monkeypatch):
    asked, lock = [], threading.Lock()

    def fails_once(self, url, real=Toy.several_agents):
        found = real(self, url)  # all its requests are there: only the error itself can tell
        with lock:
            asked.append(url)
            if len(asked) == 1:
                raise TimeoutError("the model did not answer")
        return found

    monkeypatch.setattr(Toy, "several_agents", fails_once)
    with pytest.raises(BaseExceptionGroup, match="in their threads"):
        toy("test_attempts_never_mix_across_threads")
