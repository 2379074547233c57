"""The record: what an earlier attempt requested from its models and tools, and the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.errors import ConfigError
from lightning_spans.schema import spans as names
from lightning_spans.schema.agents import name_of, path_of
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import read_json
from lightning_spans.schema.spans import AGENT_PATH, ENDPOINT, FRAMEWORK, REQUEST, RESPONSE, Json, Span
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.prompt.equality import same_data
from lightning_trainer.gateway.replay.requests import RequestContent, read_request

_RAW: Final = frozenset({"/responses", "/completions", "/messages"})  # endpoints whose bodies are not chat completions
# Libraries whose calls pass a patch that asks a gateway.
_REPLAYABLE: Final = frozenset({"openai", "httpx", "httpx2", "litellm", "gateway"})


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A recorded model call.

    Attributes:
        number: its position among the calls, from 0 in the order of their start.
        agents: the names of its agent; empty: nothing named it.
        node: contains the answer.
        asked: its request.
        raw: whether that is the body as sent, of Responses or a text completion, not in a chat's format.
        call_id: of the gateway's record, otherwise the id of the span.
    """

    number: int
    agents: frozenset[str]
    node: Node
    asked: RequestContent
    raw: bool
    call_id: str

    @property
    def agent(self) -> str | None:
        """Its agent's name; None if nothing named it."""
        return self.node.span.agent or next(iter(self.agents), None)

    @property
    def ended_ns(self) -> int:
        """When its agent had the answer. The span of a stream that nobody closes ends later."""
        span, call = self.node.span, self.node.call
        return span.end_ns if call is None or call.end_ns < span.start_ns else min(span.end_ns, call.end_ns)

    @property
    def is_left(self) -> bool:
        """Whether its agent was cancelled while it waited for the answer."""
        return self.node.span.attributes.get(names.ERROR_TYPE) == "CancelledError"

    @property
    def body(self) -> dict[str, Any] | None:
        """The body of the answer as the agent received it; None if its span has none."""
        text = self.node.span.attributes.get(RESPONSE)
        try:
            found = read_json(text) if isinstance(text, str) else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTool:
    """A recorded tool call.

    Attributes:
        name: of the tool.
        call_id: that of the model's request for it; None if it was not recorded.
        agent: the agent that called it.
        arguments: equal for equal arguments.
        failed: whether it raised.
        result: as text; None if it was not recorded.
        error: why it failed.
        start_ns: Unix time in nanoseconds.
        marks: its span's attributes.
        calls: numbers of the model calls made within it, by an agent that it calls.
        tools: numbers of the tools called within it.
    """

    name: str
    call_id: str | None
    agent: str | None
    arguments: str
    failed: bool
    result: str | None
    error: str
    start_ns: int
    marks: Mapping[str, Json]
    calls: tuple[int, ...] = ()
    tools: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """An earlier attempt.

    Attributes:
        attempt_id: its id; that of its trace if no runner created it.
        rollout_id: id of its rollout; empty if no runner created it.
        calls: its model calls, in the order of their start.
        tools: its tool calls, in the order of their start.
    """

    attempt_id: str
    rollout_id: str
    calls: tuple[RecordedCall, ...]
    tools: tuple[RecordedTool, ...]


def read_record(store: Store, attempt_id: str) -> Record:
    """Read an earlier attempt from the store.

    Raises:
        ConfigError: it does not exist, or nothing of it was recorded.
    """
    found = [trace for trace in traces_of(store, attempt_ids=[attempt_id]) if trace.attempt_id == attempt_id]
    if not found and (spans := store.spans(trace_ids=[attempt_id])):
        found = [Trace.build(spans, store.calls(trace_ids=[attempt_id]))]  # created without a runner, as in production
    if not found:
        raise ConfigError(f"attempt {attempt_id} is not in the store. Was it deleted?")
    return record_of(found[0], attempt_id)


def record_of(trace: Trace, attempt_id: str) -> Record:
    """Use a trace as a record.

    Raises:
        ConfigError: it has no model call.
    """
    if not trace.chats:
        raise ConfigError(f"attempt {attempt_id} has no recorded model call. Was it attached, or run by a runner?")
    calls = tuple(_call(number, node) for number, node in enumerate(trace.chats))
    numbers = {id(node): number for nodes in (trace.chats, trace.tools) for number, node in enumerate(nodes)}
    return Record(attempt_id, trace.rollout_id or "", calls, tuple(_tool(node, numbers) for node in trace.tools))


def unanswerable(call: RecordedCall) -> str | None:
    """Return why a call cannot be answered from the record; None if it can."""
    node = call.node
    framework = str(node.span.attributes.get(FRAMEWORK))
    if node.call is None and framework not in _REPLAYABLE:
        return f"it was made with {framework}, whose calls do not go through the gateway"
    if node.error is None and node.call is None and call.body is None:
        return "its answer was not recorded"
    if not call.asked.lines:
        return "its request was not recorded"
    return None


def _call(number: int, node: Node) -> RecordedCall:
    span, call = node.span, node.call
    agents = _names(span, call)
    if call is not None and call.request:
        raw = "messages" not in call.request and "input" in call.request
        return RecordedCall(number, agents, node, read_request(call.request), raw, call.call_id)
    text = span.attributes.get(REQUEST)
    try:
        body = read_json(text) if isinstance(text, str) else {}
    except ValueError:
        body = {}
    raw = span.attributes.get(ENDPOINT) in _RAW
    return RecordedCall(number, agents, node, read_request(body if isinstance(body, dict) else {}), raw, span.span_id)


def _names(span: Span, call: Call | None) -> frozenset[str]:
    """Return the possible names of an agent's calls.

    Its name, and the path that distinguishes it from agents of that name.
    """
    known = {path_of(span.agent, span.attributes.get(AGENT_PATH)), span.agent} if span.agent is not None else set()
    if call is not None and call.agent is not None:
        known |= {call.agent, name_of(call.agent)}
    return frozenset(known)


def _tool(node: Node, numbers: Mapping[int, int]) -> RecordedTool:
    span, inside = node.span, list(_inside(node))
    told = span.attributes
    call_id = told.get(names.TOOL_CALL_ID)
    failed = span.status == "error"
    result = told.get(names.TOOL_RESULT)
    return RecordedTool(
        name=str(told.get(names.TOOL_NAME) or span.name),
        call_id=call_id if isinstance(call_id, str) else None,
        agent=span.agent,
        arguments=same_data(told.get(names.TOOL_ARGUMENTS) or "{}"),
        failed=failed,
        result=result if isinstance(result, str) else None,
        error=span.status_message or str(told.get(names.ERROR_TYPE) or "") if failed else "",
        start_ns=span.start_ns,
        marks=told,
        calls=tuple(numbers[id(inner)] for inner in inside if inner.is_chat),
        tools=tuple(numbers[id(inner)] for inner in inside if inner.span.operation == names.EXECUTE_TOOL),
    )


def _inside(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from _inside(child)


def calls_of_agent(calls: Sequence[RecordedCall], agent: str | None) -> list[RecordedCall]:
    """Return the calls of all agents with a name. For a call without a name, return those that may be its own."""
    if agent is None:
        return list(calls)
    return [call for call in calls if not call.agents or not call.agents.isdisjoint((agent, name_of(agent)))]
