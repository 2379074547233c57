"""The nodes of a trace: spans at their position in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_spans.chat.response import NO_ANSWER, Answer, read_answer
from lightning_spans.schema.agents import escape_name, name_of
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import (
    AGENT_PATH,
    CHAT,
    ERROR_TYPE,
    INVOKE_WORKFLOW,
    RESPONSE,
    RESPONSE_ID,
    RESPONSE_MODEL,
    Json,
    Span,
)


class Node:
    """A span with its call and its relatives. Only `Trace.build` changes a node.

    Attributes:
        span: the record; a missing agent, rollout or attempt is filled in from its ancestors.
        call: the gateway's record of this model call; None for other spans, and if the gateway saw nothing.
        children: ordered by start.
        parent: None for a root, an orphan, and where a cycle was cut.
        merged: ids of the spans merged into this one.
    """

    __slots__ = ("_answer", "call", "children", "merged", "parent", "span")

    def __init__(self, span: Span, call: Call | None = None) -> None:
        self.span = span
        self.call = call
        self.children: Sequence[Node] = ()  # most nodes are leaves: a list for each would keep the collector busy
        self.parent: Node | None = None
        self.merged: tuple[str, ...] = ()
        self._answer: Answer | None = None

    def __repr__(self) -> str:
        span = self.span
        return (
            f"Node({span.operation} {span.name!r} {span.span_id}, agent={span.agent!r}, {len(self.children)} children)"
        )

    def add(self, child: Node) -> None:
        """Add a node below this one, after the others."""
        child.parent = self
        if isinstance(self.children, list):
            self.children.append(child)
        else:
            self.children = [child]

    @property
    def path(self) -> str | None:
        """Path of its agent, outermost first: ``billing/extract``; None if no agent is named."""
        agent = self.span.agent
        at: Node | None = None if agent is None else self
        while at is not None and at.span.agent == agent:  # other sources record it only at the agent's own span
            known = at.span.attributes.get(AGENT_PATH)
            if isinstance(known, str) and name_of(known) == agent and at.span.operation != INVOKE_WORKFLOW:
                return known
            at = at.parent
        return None if agent is None else escape_name(agent)

    @property
    def is_chat(self) -> bool:
        """Whether this is a model call."""
        return self.span.operation == CHAT

    @property
    def answer(self) -> Answer:
        """The model's answer: from the gateway's call, otherwise from the response body in the span."""
        if self._answer is None:
            self._answer = self._read_answer()
        return self._answer

    def _read_answer(self) -> Answer:
        call, attributes = self.call, self.span.attributes
        if call is not None and (call.choices or call.error is not None):
            seen = attributes.get(RESPONSE_ID)
            return Answer(call.prompt_token_ids, call.choices, seen or call.response_id, call.policy)
        text = attributes.get(RESPONSE)
        kept = read_answer(text) if text else NO_ANSWER
        response_id = attributes.get(RESPONSE_ID) or (call.response_id if call else None) or kept.response_id
        model = (call.policy if call else None) or kept.model or attributes.get(RESPONSE_MODEL)
        return Answer(kept.prompt_token_ids, kept.choices, response_id, model)

    @property
    def policy_version(self) -> int | None:
        """Version number of the weights that answered; None if not recorded."""
        return self.call.policy_version if self.call is not None else None

    @property
    def error(self) -> str | None:
        """Why the operation failed; None if it did not."""
        if self.span.status == "error":
            kind = self.span.attributes.get(ERROR_TYPE)
            return self.span.status_message or (self.call and self.call.error) or str(kind or "error")
        return self.call.error if self.call is not None else None

    def to_json(self) -> dict[str, Json]:
        """Return the line of ``traces --json``; see `Trace.to_json_lines`."""
        span = self.span
        line: dict[str, Json] = {
            "operation": span.operation,
            "name": span.name,
            "agent": span.agent,
            "trace_id": span.trace_id,
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "rollout_id": span.rollout_id,
            "attempt_id": span.attempt_id,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "status": span.status,
            "attributes": dict(span.attributes),
        }
        if span.status_message:
            line["status_message"] = span.status_message
        if span.operation == CHAT:
            line.update(self._tokens())
        return line

    def _tokens(self) -> dict[str, Json]:
        answer = self.answer
        first = answer.choices[0] if answer.choices else None
        line: dict[str, Json] = {
            "call_id": self.call.call_id if self.call is not None else None,
            "response_id": answer.response_id,
            "prompt_token_ids": _list(answer.prompt_token_ids),
            "response_token_ids": _list(first.token_ids) if first else None,
            "logprobs": _list(first.logprobs) if first else None,
            "policy_version": self.policy_version,
        }
        if len(answer.choices) > 1:
            line["choices"] = [_choice(choice) for choice in answer.choices]
        return line


def _choice(choice: Choice) -> dict[str, Json]:
    return {
        "index": choice.index,
        "response_token_ids": _list(choice.token_ids),
        "logprobs": _list(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "message": dict(choice.message),
    }


def _list(values: tuple[Json, ...] | None) -> list[Json] | None:
    return None if values is None else list(values)


class MissingHalf(StrEnum):
    """Why a model call has no span, or a span no call; a member is its text."""

    NOT_SEEN = "not recorded by the gateway: sent to another endpoint, or failed"
    SPARE = "retried: another call of the same span has the answer that the agent got"
    NO_SPAN = (
        "no span: none has its traceparent, its response id, or its agent and request. The agent is not attached, or"
        " its span was not delivered"
    )
    UNNAMED = (
        "no name: its request had no traceparent, no span has its response id, and no header or key names its agent"
    )
    AMBIGUOUS = "several spans: its agent made more than one call like it, so it can't be matched to one of them"

    @property
    def slug(self) -> str:
        """Its name in metrics."""
        return self.partition(":")[0].replace(" ", "_")


@dataclass(frozen=True, slots=True)
class HalfCall:
    """Half a model call: a call without a span, a span without a recorded call, or a spare call.

    Attributes:
        reason: why the other half is missing.
        node: its chat node; None for a call without a node.
        call: the call; None for a span without one.
    """

    reason: MissingHalf
    node: Node | None = None
    call: Call | None = None
