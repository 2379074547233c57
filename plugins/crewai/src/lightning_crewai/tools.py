"""Tool calls: those a model asks for, in any provider's format, and those that CrewAI's events report."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from crewai.tools import BaseTool
from crewai.tools.structured_tool import CrewStructuredTool
from crewai.utilities.string_utils import sanitize_tool_name

from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tool_requests import ToolRequest, take
from lightning_spans.record.replay import RecordedOutcome, arun_or_replay, keep_whole, run_or_replay, tool_around
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan
    from lightning_spans.record.instrument.tracker import Tracker


_FINGERPRINTS = "security_context"  # CrewAI's own argument: ids of agent and task, different in each run
_NOBODY = "coworker mentioned not found"  # CrewAI's answer to a model that names an unknown coworker
# runs a model's own tool calls, several at once in threads; its module has moved between versions
_EXECUTORS: Final = {
    "crewai.agents.crew_agent_executor": "CrewAgentExecutor",
    "crewai.agents.agent_executor": "AgentExecutor",
    "crewai.experimental.agent_executor": "AgentExecutor",
}
_called: Final[ContextVar[str | None]] = ContextVar("lightning_crewai_tool_call", default=None)


def bind(tracker: Tracker) -> Iterator[Callable[[], None]]:
    """In a replay, return recorded results instead of running tools; what is yielded removes each patch.

    A native tool call runs through the `run` of a tool; a call written as text runs through the `invoke` of a tool made
    from
    it. Both count a tool's uses, so a replayed call is counted here.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tool: Any, *args: Any, **kwargs: Any) -> Any:
            if not tracker.live:
                return original(tool, *args, **kwargs)
            with tracker.guard():
                _tell_call(tool, args, kwargs)
            return run_or_replay(
                lambda: original(tool, *args, **kwargs), lambda given: _replay_use(tool, given), keep=keep_whole
            )

        async def arun(tool: Any, *args: Any, **kwargs: Any) -> Any:
            if not tracker.live:
                return await original(tool, *args, **kwargs)
            with tracker.guard():
                _tell_call(tool, args, kwargs)
            return await arun_or_replay(
                lambda: original(tool, *args, **kwargs), lambda given: _replay_use(tool, given), keep=keep_whole
            )

        return arun if inspect.iscoroutinefunction(original) else run

    for name in ("run", "arun"):
        if hasattr(BaseTool, name):
            yield replace_in_subclasses(BaseTool, name, wrap)
    for name in ("invoke", "ainvoke"):
        yield replace(CrewStructuredTool, name, wrap)
    yield from _keep_ids()


def _keep_ids() -> Iterator[Callable[[], None]]:
    """Keep the model's id of the call that a thread runs, because no event reports it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(executor: Any, *args: Any, **kwargs: Any) -> Any:
            token = _called.set(kwargs.get("call_id") or _call_id(args[0] if args else kwargs.get("tool_call")))
            try:
                return original(executor, *args, **kwargs)
            finally:
                _called.reset(token)

        return execute

    kinds: list[type] = []
    for module, name in _EXECUTORS.items():
        try:
            kind = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        method = "_execute_single_native_tool_call"
        if kind not in kinds and method in vars(kind):
            kinds.append(kind)
            yield replace(kind, method, wrap)


def _tell_call(tool: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Set name and arguments on the span in a replay. For calls written as text, the event reports them late."""
    span = tool_around()
    if span is None or span.attempt is None or span.attempt.replay is None or names.REPLAYED in span.attributes:
        return
    if isinstance(tool, CrewStructuredTool):
        given = kwargs.get("input", args[0] if args else {})
        if isinstance(given, Mapping):
            given = {name: value for name, value in given.items() if name != _FINGERPRINTS}
        span.set(**{names.TOOL_NAME: sanitize_tool_name(tool.name)})
        span.set(**{names.TOOL_ARGUMENTS: given if isinstance(given, str) else to_json(given)})


def _replay_use(tool: Any, given: RecordedOutcome) -> Any:
    """Count the use of a tool whose code is not run, and return or raise the recorded outcome."""
    claim = getattr(tool, "_claim_usage", None) or getattr(tool, "_increment_usage_count", None)
    if claim is not None:
        claim()
    elif hasattr(tool, "current_usage_count"):
        tool.current_usage_count += 1
    return given.outcome()


def requests_in(response: Any) -> Iterator[ToolRequest]:
    """Return the tool calls in an answer, in any provider's format."""
    if not isinstance(response, Sequence) or isinstance(response, str):
        return
    for call in response:
        function = _get(call, "function") or call
        name = _get(function, "name")
        given = _first(function, "arguments", "input", "args")
        if isinstance(name, str) and given is not None:
            yield ToolRequest(_call_id(call), name, given if isinstance(given, str) else to_json(given))


def take_request(requests: list[ToolRequest], name: str, arguments: Any) -> ToolRequest | None:
    """Take out the request for a tool call: the same name, and preferably the same id or arguments."""
    call_id = _called.get()
    known = call_id is not None and any(request.call_id == call_id for request in requests)

    def same(request: ToolRequest) -> bool:
        if known:
            return request.call_id == call_id
        return arguments in (request.arguments, _parse_or_none(str(request.arguments)))

    return take(requests, lambda request: request.name == name, same)


def tell_tool(span: OpenSpan, event: Any) -> None:
    """Add what is known when a tool ends. Without native tool calls, its arguments are read late."""
    span.name = event.tool_name
    span.set(**{names.TOOL_NAME: event.tool_name})
    if not isinstance(event.tool_args, str) and event.tool_args is not None:
        span.set(**{names.TOOL_ARGUMENTS: to_json(event.tool_args)})
    output = getattr(event, "output", None)
    there = nobody_of(event) is None
    if there:
        span.set(**{names.HANDOFF: handed_to(event.tool_name, event.tool_args)})
    if output is not None:
        text = output if isinstance(output, str) else to_json(output)
        span.set(**{names.TOOL_RESULT: text})
        # Usually the text says what was returned; for an error it says what was raised.
        if there and span.attributes.get(names.TOOL_RETURNED) == dumps(text).decode():
            del span.attributes[names.TOOL_RETURNED]


def nobody_of(event: Any) -> str | None:
    """Return the unknown coworker's name that a model tried to delegate to; None otherwise."""
    output = getattr(event, "output", None)
    if not isinstance(output, str) or handed_to(event.tool_name, event.tool_args) is None:
        return None
    return output.strip() if _NOBODY in output else None


def handed_to(name: str, arguments: Any) -> str | None:
    """Return the agent that receives work or a question, if the tool is one of CrewAI's two delegation tools."""
    if not name.lower().replace(" ", "_").endswith("_to_coworker"):
        return None
    given = _parse_or_none(arguments) if isinstance(arguments, str) else arguments
    coworker = _first(given, "coworker", "co_worker")
    return coworker.strip() if isinstance(coworker, str) else None


def _call_id(call: Any) -> Any:
    return _first(call, "call_id", "id", "toolUseId")


def _parse_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _first(thing: Any, *keys: str) -> Any:
    return next((value for key in keys if (value := _get(thing, key)) is not None), None)


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)
