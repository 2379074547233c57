"""Converts spans of other libraries to our schema on arrival: OpenInference's, and OTel GenAI's in all forms.

Nothing is removed: our attributes are added to the received ones. Our own spans pass unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from openinference.semconv.trace import (
    MessageAttributes,
    MessageContentAttributes,
    SpanAttributes,
    ToolAttributes,
    ToolCallAttributes,
)

from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps
from lightning_spans.schema.spans import Json, Span
from lightning_trainer.gateway.ingest import genai

_OPERATIONS: Final = {
    "LLM": names.CHAT,
    "TOOL": names.EXECUTE_TOOL,
    "AGENT": names.INVOKE_AGENT,
    "EMBEDDING": "embeddings",
    "RETRIEVER": "retrieval",
}
_RENAMED: Final = {  # in every operation
    SpanAttributes.SESSION_ID: names.CONVERSATION_ID,
    SpanAttributes.LLM_TOKEN_COUNT_PROMPT: names.INPUT_TOKENS,
    SpanAttributes.LLM_TOKEN_COUNT_COMPLETION: names.OUTPUT_TOKENS,
    SpanAttributes.LLM_PROVIDER: names.PROVIDER,
    SpanAttributes.LLM_MODEL_NAME: names.REQUEST_MODEL,
}
_LOOP: Final = ("model", "agent", "tools")  # nodes of LangChain's own loop, which are not names of agents
_NO_ID: Final = "__fake_id__"  # the Agents SDK's, if a stream of chat completions has none
_TOOL: Final = {
    SpanAttributes.TOOL_NAME: names.TOOL_NAME,
    SpanAttributes.TOOL_ID: names.TOOL_CALL_ID,
    SpanAttributes.INPUT_VALUE: names.TOOL_ARGUMENTS,
    SpanAttributes.OUTPUT_VALUE: names.TOOL_RESULT,
}


def adopt_span(span: Span) -> Span:
    """Return the span in our schema. Our own spans, and spans without meaning here, are returned unchanged."""
    if span.operation == "internal":
        kind = str(span.attributes.get(SpanAttributes.OPENINFERENCE_SPAN_KIND, "")).upper()
        metadata = genai.parse_if_json(span.attributes.get(SpanAttributes.METADATA))
        graph = metadata if isinstance(metadata, dict) else {}
        operation = _OPERATIONS.get(kind, "internal")
        if kind == "CHAIN" and span.name == graph.get("lc_agent_name"):
            operation = names.INVOKE_AGENT
        if operation != "internal":
            return _from_openinference(span, operation, graph)
    return genai.complete_span(span)


def _from_openinference(span: Span, operation: str, graph: Mapping[str, Json]) -> Span:
    given = span.attributes
    added = {ours: given[theirs] for theirs, ours in _RENAMED.items() if theirs in given}
    if operation == names.CHAT:
        added |= _chat(given)
    elif operation == names.EXECUTE_TOOL:
        added |= {ours: given[theirs] for theirs, ours in _TOOL.items() if theirs in given}
        added.setdefault(names.TOOL_NAME, span.name)
    agent = span.agent or _agent(span, operation, graph)
    return replace(span, operation=operation, agent=agent, attributes={**given, **added})


def _agent(span: Span, operation: str, graph: Mapping[str, Json]) -> str | None:
    """Name the agent from instrumentors' attributes: LangChain's metadata, the node of a graph, the role of a tool."""
    given = span.attributes
    node = graph.get("langgraph_node")
    known = [given.get(SpanAttributes.AGENT_NAME), graph.get("lc_agent_name"), given.get("tool.agent_role")]
    known.append(None if node in _LOOP else node)
    if operation == names.INVOKE_AGENT:
        known += [given.get(SpanAttributes.GRAPH_NODE_ID), span.name]
    return next((str(name) for name in known if name), None)


def _chat(given: Mapping[str, Json]) -> dict[str, Json]:
    """Return request and response: the raw bodies if the span has them, otherwise built from its messages."""
    asked = given.get(SpanAttributes.INPUT_VALUE)
    request = _body(asked, "messages", holding="role") or _prompt(asked) or _request(given)
    told = given.get(SpanAttributes.OUTPUT_VALUE)
    response = _body(told, "choices") or _body(told, "output") or _response(given)
    if response.get("id") in (None, _NO_ID):
        response = {**response, "id": _langchains_id(told)}
    added = {names.REQUEST: dumps(request).decode(), names.RESPONSE: dumps(response).decode()}
    if isinstance(response.get("id"), str):
        added[names.RESPONSE_ID] = response["id"]
    return added


def _body(text: Json, key: str, *, holding: str = "") -> dict[str, Json] | None:
    body = genai.parse_if_json(text)
    if isinstance(body, list) and len(body) == 1:  # as the Agents SDK's streams are kept
        body = body[0]
    if not isinstance(body, dict) or not isinstance(body.get(key), list):
        return None
    # LangChain's messages are under ``messages`` too, in another format.
    whole = all(isinstance(one, dict) and (not holding or holding in one) for one in body[key])
    return body if whole else None


def _prompt(text: Json) -> dict[str, Json] | None:
    """Return the body of a text completion."""
    body = genai.parse_if_json(text)
    return body if isinstance(body, dict) and isinstance(body.get("prompt"), (str, list)) else None


def _langchains_id(told: Json) -> str | None:
    """Find the model server's id in what LangChain keeps of an answer, if it is there."""
    try:
        response_id = genai.parse_if_json(told)["generations"][0][0]["message"]["kwargs"]["response_metadata"]["id"]
    except (TypeError, KeyError, IndexError):
        return None
    return response_id if isinstance(response_id, str) else None


def _request(given: Mapping[str, Json]) -> dict[str, Json]:
    parameters = genai.parse_if_json(given.get(SpanAttributes.LLM_INVOCATION_PARAMETERS))
    request = dict(parameters) if isinstance(parameters, dict) else {}
    request["messages"] = [_message(one) for one in _gather_list(given, SpanAttributes.LLM_INPUT_MESSAGES)]
    schemas = (one.get(ToolAttributes.TOOL_JSON_SCHEMA) for one in _gather_list(given, SpanAttributes.LLM_TOOLS))
    if tools := [genai.parse_if_json(schema) for schema in schemas if schema]:
        request["tools"] = tools
    if (model := given.get(SpanAttributes.LLM_MODEL_NAME)) is not None:
        request.setdefault("model", model)
    return request


def _response(given: Mapping[str, Json]) -> dict[str, Json]:
    answers = [_message(one) for one in _gather_list(given, SpanAttributes.LLM_OUTPUT_MESSAGES)]
    return {"choices": [{"index": at, "message": message} for at, message in enumerate(answers)]}


def _message(one: Mapping[str, Json]) -> dict[str, Json]:
    texts = [part.get(MessageContentAttributes.MESSAGE_CONTENT_TEXT) for part in _gather_list(one, "message.contents")]
    content = one.get(MessageAttributes.MESSAGE_CONTENT)
    message: dict[str, Json] = {
        "role": one.get(MessageAttributes.MESSAGE_ROLE, "assistant"),
        "content": "\n".join(text for text in texts if isinstance(text, str)) if content is None and texts else content,
    }
    calls = [
        genai.tool_call(
            call.get(ToolCallAttributes.TOOL_CALL_ID),
            call.get(ToolCallAttributes.TOOL_CALL_FUNCTION_NAME),
            call.get(ToolCallAttributes.TOOL_CALL_FUNCTION_ARGUMENTS_JSON),
        )
        for call in _gather_list(one, MessageAttributes.MESSAGE_TOOL_CALLS)
    ]
    if calls:
        message["tool_calls"] = calls
    if (answered := one.get(MessageAttributes.MESSAGE_TOOL_CALL_ID)) is not None:
        message["tool_call_id"] = answered
    return message


def _gather_list(given: Mapping[str, Json], prefix: str) -> list[dict[str, Any]]:
    """Collect ``prefix.0.a``, ``prefix.0.b``, ``prefix.1.a`` into a list of objects, in the order of their numbers."""
    found: dict[int, dict[str, Any]] = {}
    start = prefix + "."
    for name, value in given.items():
        if name.startswith(start):
            number, _, rest = name[len(start) :].partition(".")
            if number.isdigit():
                found.setdefault(int(number), {})[rest] = value
    return [found[number] for number in sorted(found)]
