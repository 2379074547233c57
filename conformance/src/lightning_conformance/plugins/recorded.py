"""What every plugin promises of recordings: each call, agent and tool once, complete, and in its place."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_conformance.plugins.program import AGENTS, PROMPTS, SCENARIOS, TEAMS, Recording, record, span_of
from lightning_conformance.plugins.script import agent_of, tool_results
from lightning_conformance.plugins.server import ReceivedRequest
from lightning_spans.record.delivery import otlp, otlp_reader
from lightning_spans.record.tracing.tracers import TRACERS
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import from_json, to_json
from lightning_spans.schema.spans import Span

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)
_tool_scenarios = pytest.mark.parametrize("scenario", ["tool_call", "parallel_tools", "nested"])
_CUT_SHORT = {"abandoned", "failed", "slow", "cut"}


class RecordedPromises:
    """A part of `PluginConformance`, which provides the fixtures `recorded` and `folder`, and the programs."""

    framework: ClassVar[str]
    program: Callable[[str], Callable[[str], Any]]

    @each_scenario
    def test_every_model_call_is_one_span(self, scenario: str, tracer: str, recorded: Any) -> None:
        """Every call is one chat span: streams, failures, and all tries of one call together.

        If it fails: with too few spans, calls bypass the patched client (does the plugin bind it?) and no event makes
        up for them; with too many, the framework's own event makes a span although the patched client made one.
        """
        found = recorded(scenario, tracer)
        assert {agent_of(request.body) for request in found.requests} - TEAMS == AGENTS[scenario]
        first_tries = [r for r in found.requests if r.headers.get("x-stainless-retry-count", "0") == "0"]
        assert len(found.chats) == len(first_tries) > 0
        assert {span.span_id for span in found.chats} == {span_of(request) for request in found.requests}

    @each_scenario
    def test_every_call_has_its_agent(self, scenario: str, tracer: str, recorded: Any) -> None:
        """The agent on a chat span is the one whose instructions were sent, even if one name begins or ends another.

        If it fails: the name must be visible in the OTel Context when the HTTP request is built; a handler that runs in
        another thread or task sets it too late.
        """
        for request, span in recorded(scenario, tracer).calls():
            assert span.agent == agent_of(request.body)

    @each_scenario
    def test_request_and_response_are_as_sent(self, scenario: str, tracer: str, recorded: Any) -> None:
        """The bodies on a chat span are those sent and received; a stream is assembled into the whole response.

        If it fails: record what was sent instead of the framework's view, and before it can change.
        """
        for request, span in recorded(scenario, tracer).calls():
            assert json.loads(span.attributes[names.REQUEST]) == request.body
            assert span.attributes[names.REQUEST_MODEL] == request.body["model"]
            assert span.attributes[names.STREAMED] is bool(request.body.get("stream"))
            if scenario not in _CUT_SHORT:
                assert json.loads(span.attributes[names.RESPONSE]) == request.answer
                assert span.attributes[names.RESPONSE_ID] == request.answer["id"]
                assert span.status == "ok"

    @each_scenario
    def test_token_ids_are_kept(self, scenario: str, tracer: str, recorded: Any) -> None:
        """The token ids that a server sends are on the span; those of a stream are concatenated.

        If it fails: extras of the response were dropped on the way; keep the body's text, not a parsed model of it.
        """
        for request, span in recorded(scenario, tracer).calls():
            if scenario in _CUT_SHORT or "choices" not in request.answer:
                continue
            response = json.loads(span.attributes[names.RESPONSE])
            assert response["prompt_token_ids"] == request.answer["prompt_token_ids"]
            for choice, sent in zip(response["choices"], request.answer["choices"], strict=True):
                assert choice["token_ids"] == sent["token_ids"] != []

    def test_every_choice_is_kept(self, tracer: str, recorded: Any) -> None:
        """A call that requests two choices is one span that contains both, and the requested number.

        If it fails: look for code that keeps only the first choice of a response; `n` is read from the request as sent.
        """
        ((request, span),) = recorded("choices", tracer).calls()
        assert span.attributes[names.REQUEST_CHOICE_COUNT] == 2
        assert len(span.attributes[names.FINISH_REASONS]) == 2
        assert json.loads(span.attributes[names.RESPONSE])["choices"] == request.answer["choices"]
        assert len(request.answer["choices"]) == 2

    def test_namesakes_are_told_apart(self, tracer: str, recorded: Any) -> None:
        """Two agents of the same name, in two teams, have separate spans, and paths that name their teams.

        If it fails: begin the span of the team (or of the enclosing agent) before that of the agent, with its name as
        `spans.AGENT_PATH`; or an agent counts as active because another of the same name is.
        """
        found = recorded("namesakes", tracer)
        by_id = {span.span_id: span for span in found.spans}
        paths = []
        for span in found.chats:
            around = by_id[span.parent_id]
            while around.operation != names.INVOKE_AGENT:
                around = by_id[around.parent_id]
            assert around.agent == span.agent
            if span.agent == "writer":
                paths.append(around.attributes[names.AGENT_PATH])
        assert sorted(paths) == ["blue/writer", "red/writer"]

    def test_an_abandoned_stream_is_closed_and_marked(self, tracer: str, recorded: Any) -> None:
        """A stream that is not read to its end is still a span, with what was read of it, and is marked as abandoned.

        If it fails: the span ends only with the stream; end it also when the stream is closed or collected.
        """
        ((request, span),) = recorded("abandoned", tracer).calls()
        assert span.attributes[names.ABANDONED] is True
        text = json.loads(span.attributes[names.RESPONSE])["choices"][0]["message"]["content"] or ""
        whole = request.answer["choices"][0]["message"]["content"]
        assert whole.startswith(text)
        assert text != whole

    @pytest.mark.parametrize("scenario", ["failed", "slow", "cut"])
    def test_a_failed_call_is_an_error(self, scenario: str, tracer: str, recorded: Any) -> None:
        """A call that failed, or was no longer awaited, has status error, the kind of error and its text.

        If it fails: pass the exception to `OpenSpan.end(error=...)`.
        """
        for _, span in recorded(scenario, tracer).calls():
            assert span.status == "error"
            assert span.status_message
            assert span.attributes[names.ERROR_TYPE]

    @_tool_scenarios
    def test_every_tool_call_is_one_span(self, scenario: str, tracer: str, recorded: Any) -> None:
        """A tool call is one span with name, id, arguments, result, and the agent that requested it.

        If it fails: see which attribute differs; if the framework does not report the id, match it by name and
        arguments among the calls that the agent's model requested.
        """
        _check_tool_calls(recorded(scenario, tracer))

    def test_integers_beyond_64_bits_are_kept(self, tracer: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tool call with an argument and a result beyond 64 bits is recorded like any other.

        If it fails: write JSON with `lightning_openai.json_text.to_json` and read it with `read_json`: orjson refuses
        to write such integers, and rounds those that it reads.
        """
        monkeypatch.setitem(PROMPTS, "tool_call", f'call add {{"a": {10**30}, "b": 7}}')
        program = self.program("tool_call")
        found = record(program, folder / f"integers-{tracer}", framework=self.framework, tracer=tracer)
        _check_tool_calls(found)
        assert str(10**30 + 7) in found.tools[0].attributes[names.TOOL_RESULT]

    def test_a_tool_that_raises_is_an_error(self, tracer: str, recorded: Any) -> None:
        """A tool that raises leaves a span with status error, its arguments, and what it raised.

        If it fails: the framework turned the exception into a message; its own event for failed tools still has it.
        """
        (span,) = recorded("tool_error", tracer).tools
        assert span.status == "error"
        assert "out of order" in span.status_message
        assert (span.name, span.agent) == ("fail", "caller")
        assert json.loads(span.attributes[names.TOOL_ARGUMENTS]) == {"reason": "out of order"}

    @pytest.mark.parametrize("scenario", ["unknown_tool", "unreadable_arguments"])
    def test_a_tool_call_that_can_not_be_carried_out_is_an_error(
        self, scenario: str, tracer: str, recorded: Any
    ) -> None:
        """A call of a tool that does not exist, or with unreadable arguments, is one tool span with an error.

        If it fails: no tool runs, so the framework's event for tools does not fire; make the span where the framework
        reports the error to the model, or refuses the model's answer.
        """
        found = recorded(scenario, tracer)
        (asked,) = [call for request in found.requests for call in _calls_in(request)]
        (span,) = found.tools
        assert (span.status, span.agent) == ("error", "caller")
        assert span.status_message
        assert span.attributes[names.TOOL_CALL_ID] == asked["id"]
        assert (span.name, span.attributes[names.TOOL_NAME]) == (asked["function"]["name"], asked["function"]["name"])
        told = span.attributes[names.TOOL_ARGUMENTS]
        if scenario == "unknown_tool":  # a framework may have parsed and rewritten them
            assert json.loads(told) == json.loads(asked["function"]["arguments"])
        else:
            assert told == asked["function"]["arguments"]

    @each_scenario
    def test_there_are_no_orphans(self, scenario: str, tracer: str, recorded: Any) -> None:
        """Every span's parent exists, is in the same trace, and began before it.

        If it fails: look for a span that was never ended (nothing reported that an agent stopped), or that took its
        parent from a context that had moved on.
        """
        spans = recorded(scenario, tracer).spans
        by_id = {span.span_id: span for span in spans}
        assert len(by_id) == len(spans)
        for span in spans:
            if span.parent_id is not None:
                parent = by_id[span.parent_id]
                assert parent.trace_id == span.trace_id
                assert parent.start_ns <= span.start_ns
        if scenario in {"one_agent", "tool_call", "parallel_tools", "nested", "streaming"}:
            assert len([span for span in spans if span.parent_id is None]) == 1

    def test_an_agent_inside_a_tool_is_under_the_tool(self, tracer: str, recorded: Any) -> None:
        """A tool that runs another agent keeps the tree: boss, its tool, writer, writer's call.

        If it fails: the tool's span must be entered while the tool runs.
        """
        found = recorded("nested", tracer)
        by_id = {span.span_id: span for span in found.spans}
        (call,) = [span for span in found.chats if span.agent == "writer"]
        line = []
        span: Span | None = call
        while span is not None:
            line.append((span.operation, span.agent))
            span = by_id.get(span.parent_id or "")
        agents = [step for step in line if step[0] in {names.INVOKE_AGENT, names.EXECUTE_TOOL}]
        assert agents == [(names.INVOKE_AGENT, "writer"), (names.EXECUTE_TOOL, "boss"), (names.INVOKE_AGENT, "boss")]

    def test_both_tracers_give_the_same_rows(self, scenario: str, recorded: Any) -> None:
        """The rows in the store do not depend on the tracer, except for ids and times.

        If it fails: an attribute has a type that one of the tracers changes; use only str, bool, int, float and lists.
        """
        first, second = (Counter(map(_without_ids, recorded(scenario, tracer).spans)) for tracer in TRACERS)
        assert first == second

    @each_scenario
    def test_spans_survive_json_otlp_and_the_store(self, scenario: str, tracer: str, recorded: Any) -> None:
        """A span is the same after it is written as JSON, as OTLP or to the store, and read again.

        If it fails: look for an attribute that is not a JSON-like value.
        """
        found = recorded(scenario, tracer)
        spans = found.spans
        assert sorted(found.heard, key=_place) == sorted(spans, key=_place)
        assert [from_json(Span, json.loads(json.dumps(to_json(span)))) for span in spans] == spans
        assert otlp_reader.decode(otlp.encode(spans)) == spans


def _check_tool_calls(found: Recording) -> None:
    """Check that the requested tool calls and the recorded ones are the same."""
    asked = {call["id"]: (agent_of(r.body or {}), call["function"]) for r in found.requests for call in _calls_in(r)}
    results = {key: text for request in found.requests for key, text in tool_results(request.body or {}).items()}
    assert Counter(span.attributes[names.TOOL_CALL_ID] for span in found.tools) == Counter([*asked])
    for span in found.tools:
        agent, function = asked[span.attributes[names.TOOL_CALL_ID]]
        assert (span.name, span.agent) == (function["name"], agent)
        assert span.attributes[names.TOOL_NAME] == function["name"]
        assert json.loads(span.attributes[names.TOOL_ARGUMENTS]) == json.loads(function["arguments"])
        assert span.attributes[names.TOOL_RESULT] == results[span.attributes[names.TOOL_CALL_ID]]
        assert span.status == "ok"


def _calls_in(request: ReceivedRequest) -> Iterator[dict[str, Any]]:
    for choice in (request.answer or {}).get("choices", ()):
        yield from choice["message"].get("tool_calls", ())


def _place(span: Span) -> tuple[str, str]:
    return span.trace_id, span.span_id


def _without_ids(span: Span) -> str:
    data = to_json(span)
    for key in ("trace_id", "span_id", "start_ns", "end_ns"):
        del data[key]
    data["parent_id"] = span.parent_id is not None
    data["status_message"] = re.sub(r"\d+\.\d+ s", "", span.status_message)  # some report how long they waited
    if span.attributes.get(names.ABANDONED):  # how much was read is random if a framework reads ahead
        data["attributes"] = {key: value for key, value in span.attributes.items() if key != names.RESPONSE}
    written = json.dumps(data, sort_keys=True)
    answer = span.attributes.get(names.RESPONSE_ID)  # of two identical requests at once, either may get it
    return written.replace(answer, "") if isinstance(answer, str) and answer else written
