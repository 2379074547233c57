"""``POST /v1/responses``: OpenAI's Responses, for any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.events import named_event
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.surfaces.conversations import Conversations
from lightning_trainer.gateway.surfaces.output_items import OutputItem, OutputItems, Step
from lightning_trainer.gateway.surfaces.response_tools import OwnTool, free_text
from lightning_trainer.gateway.surfaces.responses_request import read_response

_ECHOED: Final[Mapping[str, Any]] = {  # settings of the request that its response repeats, and their defaults
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
_CUT: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesSurface:
    """Responses. Their messages are kept for some time, so that a request can name them by id."""

    path = "/v1/responses"
    id_prefix = "resp_"

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def begin(self, body: Mapping[str, Any], owner: str | None) -> ResponsesExchange:
        """Read a request; see `Surface.begin`."""
        before = self._conversations.before(body.get("previous_response_id"), owner)
        whole = {**body, "input": self._conversations.resolve(body.get("input"), owner)}
        return ResponsesExchange(whole, before, owner, self._conversations)

    def refusal(self, refusal: Refusal) -> bytes:
        """Return an error in OpenAI's format."""
        return refusal.body()


class ResponsesExchange:
    """One request and its answer."""

    keeps_id = False
    demands_limit = False

    def __init__(
        self,
        body: Mapping[str, Any],
        before: list[dict[str, Any]],
        owner: str | None,
        conversations: Conversations,
    ) -> None:
        read = read_response(body, before)
        asked = read.chat
        self.asked: Mapping[str, Any] = asked
        self.left_out: Mapping[str, Any] = read.left_out
        self._tools = read.tools
        self._said = asked["messages"][1:] if body.get("instructions") else asked["messages"]
        self._body, self._owner, self._conversations = body, owner, conversations
        self._parts = OutputItems()
        self._numbers = iter(range(1 << 62))
        self._begun = False

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        self._parts = OutputItems.of(completion)
        self._keep(pending)
        return dumps(self._response(pending, self._status()))

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        first = list(self._first(pending))  # before the chunk's own parts are known
        steps = list(self._parts.take(chunk))
        return b"".join([*first, *(event for step in steps for event in self._events(pending, step))])

    def end(self, pending: PendingCall) -> bytes:
        """See `Exchange`."""
        closing = [event for step in list(self._parts.end()) for event in self._events(pending, step)]
        self._keep(pending)
        status = self._status()
        last = self._event(f"response.{status}", response=self._response(pending, status))
        return b"".join([*self._first(pending), *closing, last])

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:
        """See `Exchange`. Clients raise at the second event."""
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        failed = self._event("response.failed", response={**self._response(pending, "failed"), "error": error})
        return failed + self._event("error", **error, param=None, error=error)

    def _keep(self, pending: PendingCall) -> None:
        if self._body.get("store") is not False:
            answer = dict(pending.sampled.choices[0].message) if pending.sampled.choices else {}
            messages = [*self._said, {**answer, "role": "assistant"}]
            self._conversations.keep(pending.response_id, self._owner, messages, self._items(pending))

    def _status(self) -> str:
        return "incomplete" if self._parts.finish_reason in _CUT else "completed"

    def _response(self, pending: PendingCall, status: str) -> dict[str, Any]:
        done = status in {"completed", "incomplete"}
        cut = _CUT.get(self._parts.finish_reason or "") if status == "incomplete" else None
        return {
            "id": pending.response_id,
            "object": "response",
            "created_at": pending.requested.start_ns // 1_000_000_000,
            "status": status,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "model": pending.routed.policy,
            "output": self._items(pending) if done else [],
            "usage": self._usage(pending) if done else None,
            **{
                name: default if self._body.get(name) is None else self._body[name] for name, default in _ECHOED.items()
            },
        }

    def _usage(self, pending: PendingCall) -> dict[str, Any]:
        prompt, drawn, cached = self._parts.usage(pending)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": drawn,
            "output_tokens_details": {
                "reasoning_tokens": sum(each.reasoning_tokens for each in pending.sampled.choices)
            },
            "total_tokens": prompt + drawn,
        }

    def _first(self, pending: PendingCall) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response(pending, "in_progress"))

    def _event(self, name: str, /, **data: Any) -> bytes:
        return named_event(name, {**data, "sequence_number": next(self._numbers)})

    def _events(self, pending: PendingCall, step: Step) -> Iterator[bytes]:
        what, part, text = step
        own = self._own(part)
        name = _NAMES["custom" if own is not None and own.kind == "custom" else part.kind]
        inner: dict[str, Any] = {"output_index": part.index, "item_id": _item_id(pending, part, own)}
        if part.kind != "tool":
            inner["content_index"] = 0
        if what == "open":
            item = self._item(pending, part, "in_progress")
            item |= {name: empty for name, empty in _NOTHING_YET.items() if name in item}
            yield self._event("response.output_item.added", output_index=part.index, item=item)
            if part.kind != "tool":
                yield self._event("response.content_part.added", **inner, part=_content(part))
        elif what == "more":
            # the text of a custom tool is known when its arguments are complete
            if own is None or own.kind == "function":
                logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
                yield self._event(f"{name}.delta", **inner, delta=text, **logprobs)
        else:
            if own is not None and own.kind == "custom":
                yield self._event(f"{name}.delta", **inner, delta=free_text(part.text))
            yield self._event(f"{name}.done", **inner, **_whole(part, own))
            if part.kind != "tool":
                yield self._event("response.content_part.done", **inner, part=_content(part))
            item = self._item(pending, part, "completed")
            yield self._event("response.output_item.done", output_index=part.index, item=item)

    def _own(self, part: OutputItem) -> OwnTool | None:
        return self._tools.own(part.name) if part.kind == "tool" else None

    def _items(self, pending: PendingCall) -> list[dict[str, Any]]:
        return [self._item(pending, part, "completed") for part in self._parts.parts]

    def _item(self, pending: PendingCall, part: OutputItem, status: str) -> dict[str, Any]:
        own = self._own(part)
        item: dict[str, Any] = {"id": _item_id(pending, part, own), "status": status}
        if own is not None:
            named = {"call_id": part.call_id, "name": own.name}
            named |= {} if own.namespace is None else {"namespace": own.namespace}
            if own.kind == "custom":
                return {**item, "type": "custom_tool_call", **named, "input": free_text(part.text)}
            return {**item, "type": "function_call", **named, "arguments": part.text}
        if part.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_content(part)]}
        return {**item, "type": "message", "role": "assistant", "content": [_content(part)]}


_NAMES: Final = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "tool": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


_NOTHING_YET: Final[Mapping[str, Any]] = {"arguments": "", "input": "", "content": []}  # of an item that begins


def _whole(part: OutputItem, own: OwnTool | None) -> dict[str, Any]:
    if own is not None:
        custom = own.kind == "custom"
        return {"input": free_text(part.text)} if custom else {"arguments": part.text, "name": own.name}
    return {"text": part.text, "logprobs": part.logprobs} if part.kind == "text" else {"text": part.text}


def _item_id(pending: PendingCall, part: OutputItem, own: OwnTool | None) -> str:
    kind = "custom" if own is not None and own.kind == "custom" else part.kind
    prefix = {"text": "msg", "reasoning": "rs", "tool": "fc", "custom": "ctc"}[kind]
    return f"{prefix}_{pending.response_id.removeprefix('resp_')}_{part.index}"


def _content(part: OutputItem) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}
