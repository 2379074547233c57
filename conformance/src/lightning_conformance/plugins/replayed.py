"""What every plugin promises of tools in a replay: recorded results are returned, and nothing runs twice.

The first run is recorded. In the second one, a replay of it, the model answers the same, and the scripted server is the
endpoint from which a plugin requests the result of a tool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from lightning_conformance.plugins import program as kit
from lightning_conformance.plugins.program import run, user_environment
from lightning_conformance.plugins.recorded_tools import RUN, RecordedTools
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt, attach, use_attempt
from lightning_spans.schema import spans as names
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.spans import Span

_NOTE: Final = 'call note {"text": "one"}'
# What each program does, in addition to those of `SCENARIOS`. Its one message is in `REPLAY_PROMPTS`.
REPLAYS: Final = {
    "effects": "The agent `caller` runs; it has the tool `note(text: str)`, which returns `write_note(text)`.",
    "effect_fails": "The same agent, whose tool raises what `write_note` does.",
    "effects_awaited": "A coroutine: the same agent, with a coroutine for a tool.",
}
REPLAY_PROMPTS: Final = {
    "effects": f'{_NOTE}\n{_NOTE}\ncall note {{"text": "two"}}',  # the same call twice, at the same time
    "effect_fails": 'call note {"text": "fail"}',
    "effects_awaited": f'{_NOTE}\ncall note {{"text": "two"}}',
}
NOTES: Final[list[str]] = []
"""What `write_note` was called with: the effect that must not happen twice."""
_noting = threading.Lock()


def write_note(text: str) -> str:
    """Cause an effect that cannot be undone, and return a text that differs each time.

    Raises:
        ValueError: the text is ``fail``. It is noted nevertheless.
    """
    with _noting:
        NOTES.append(text)
        number = len(NOTES)
    if text == "fail":
        raise ValueError(f"note {number} is out of order")
    return f"note {number} is {text}"


_each_replayed = pytest.mark.parametrize(
    "scenario", ["effects", "effect_fails", "effects_awaited", "tool_call", "parallel_tools", "tool_error", "nested"]
)


class ReplayPromises:
    """A part of `PluginConformance`, which provides the programs."""

    framework: ClassVar[str]
    program: Callable[[str], Callable[[str], Any]]

    @_each_replayed
    def test_no_tool_is_run_again_in_a_replay(self, scenario: str, tmp_path: Path) -> None:
        """A replay has the same output and no new effects; its tool spans are the same, and marked as replayed.

        If it fails: wrap the place where the framework runs a tool's own code with `replay.run_or_replay` or
        `arun_or_replay`, inside the tool's span; the arguments must be on the span by then.
        """
        recorded, first = self._run(scenario, tmp_path / "record")
        effects = len(NOTES)
        tools = RecordedTools(first)
        replayed, second = self._run(scenario, tmp_path / "replay", tools)
        assert replayed == recorded
        assert len(NOTES) == effects
        assert len(tools.asked) == len(_tools(second)) > 0
        assert sorted(map(_fact, _tools(second))) == sorted(map(_fact, _tools(first)))
        assert {span.attributes[names.REPLAYED] for span in _tools(second)} == {True}
        assert not [span for span in first if names.REPLAYED in span.attributes]
        again = [span for span in second if span.operation == names.CHAT and _is_inside_tool(span, second)]
        assert not again  # the model calls inside a tool are not repeated

    @pytest.mark.parametrize("scenario", ["effects", "effects_awaited"])
    def test_a_tool_that_is_to_run_in_a_replay_runs_once(self, scenario: str, tmp_path: Path) -> None:
        """If the gateway says so, tools run, each once, and each is requested once, through any number of layers.

        If it fails: look for code that requests it again, or that mistakes a missing answer for an empty one.
        """
        recorded = len(NOTES)
        tools = RecordedTools([], otherwise=RUN)
        _, spans = self._run(scenario, tmp_path, tools)
        assert len(NOTES) - recorded == len(_tools(spans)) == len(tools.asked) > 0
        assert {span.attributes[names.REPLAYED] for span in _tools(spans)} == {False}

    @pytest.mark.parametrize("scenario", ["effects", "effects_awaited"])
    def test_a_tool_that_is_not_in_the_record_is_not_run(self, scenario: str, tmp_path: Path) -> None:
        """A tool call that is not in the record, or for which there is no endpoint, is not run.

        If it fails: do not take an error of the endpoint for permission to run the tool.
        """
        recorded = len(NOTES)
        for tools in (RecordedTools([]), None):
            try:
                _, spans = self._run(scenario, tmp_path / str(tools is None), tools, replayed=True)
            except Exception:  # noqa: BLE001, S112 - as the framework will: it may also tell the model
                continue
            assert {span.status for span in _tools(spans)} == {"error"}
        assert len(NOTES) == recorded

    def _run(
        self, scenario: str, folder: Path, tools: RecordedTools | None = None, *, replayed: bool = False
    ) -> tuple[Any, list[Span]]:
        return run_attempt(self.program(scenario), folder, self.framework, tools, replayed=replayed)


def run_attempt(
    program: Callable[[str], Any],
    folder: Path,
    framework: str,
    tools: RecordedTools | None = None,
    *,
    replayed: bool = False,
) -> tuple[Any, list[Span]]:
    """Run a program in an attempt, and return its output and its spans.

    Args:
        program: called with the address of a scripted server.
        folder: where it may write.
        framework: the framework to attach.
        tools: the endpoint for tools; with one the attempt is a replay.
        replayed: whether it is a replay in any case.
    """
    replay = Replay(attempt_id="earlier") if tools is not None or replayed else None
    with user_environment(folder), ScriptedServer(tools=tools) as server:
        attempt = Attempt("r", "a", endpoint=server.base, key="attempt-key", replay=replay)
        with attach(framework, store=str(folder / "own.db"), tracer="embedded") as attachment:
            with use_attempt(attempt):
                output = run(program, server.url)
            attachment.flush(kit.PATIENCE_S)
        return output, server.spans


def run_twice(program: Callable[[str], Any], folder: Path, framework: str) -> tuple[list[Any], list[Span]]:
    """Run a program and a replay of it, and return both outputs and the spans of the replay."""
    recorded, spans = run_attempt(program, folder / "record", framework)
    replayed, again = run_attempt(program, folder / "replay", framework, RecordedTools(spans))
    return [recorded, replayed], again


def _tools(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.operation == names.EXECUTE_TOOL]


def _fact(span: Span) -> tuple[str, ...]:
    known = span.attributes
    told = (names.TOOL_NAME, names.TOOL_ARGUMENTS, names.TOOL_CALL_ID, names.TOOL_RESULT, names.ERROR_TYPE)
    return (*(str(known.get(name)) for name in told), str(span.agent), span.status, span.status_message)


def _is_inside_tool(span: Span, spans: list[Span]) -> bool:
    by_id = {other.span_id: other for other in spans}
    above = by_id.get(span.parent_id or "")
    while above is not None and above.operation != names.EXECUTE_TOOL:
        above = by_id.get(above.parent_id or "")
    return above is not None
