"""``POST /v1/responses``: OpenAI's Responses, asked of any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from lightning_trainer.server.draft import Draft
from lightning_trainer.server.refusals import Refusal
from lightning_trainer.server.surfaces.conversations import Conversations
from lightning_trainer.server.surfaces.parts import Part, Parts, Step
from lightning_trainer.server.surfaces.responses_request import chat_of_response
from lightning_trainer.server.surfaces.surface import named_event

_ECHOED: Final[Mapping[str, Any]] = {  # settings of the request that its answer repeats, and what they are by default
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
    """Responses. What they said is kept for a while, so that ``previous_response_id`` goes on from it."""

    path = "/v1/responses"
    id_prefix = "resp_"

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def begin(self, body: Mapping[str, Any], owner: str | None) -> ResponsesExchange:
        """Read a request: see `Surface.begin`."""
        before = self._conversations.before(body.get("previous_response_id"), owner)
        return ResponsesExchange(body, before, owner, self._conversations)

    def refusal(self, refusal: Refusal) -> bytes:
        """Give an error as OpenAI gives it."""
        return refusal.body()


class ResponsesExchange:
    """One request and its answer."""

    keeps_id = False

    def __init__(
        self,
        body: Mapping[str, Any],
        before: list[dict[str, Any]],
        owner: str | None,
        conversations: Conversations,
    ) -> None:
        asked = chat_of_response(body, before)
        self.asked: Mapping[str, Any] = asked
        self._said = asked["messages"][1:] if body.get("instructions") else asked["messages"]
        self._body, self._owner, self._conversations = body, owner, conversations
        self._parts = Parts()
        self._numbers = iter(range(1 << 62))
        self._begun = False

    def whole(self, draft: Draft, completion: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        self._parts = Parts.of(completion)
        self._keep(draft)
        return orjson.dumps(self._response(draft, self._status()))

    def chunk(self, draft: Draft, chunk: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        first = list(self._first(draft))  # before the chunk's own parts are known
        steps = list(self._parts.take(chunk))
        return b"".join([*first, *(event for step in steps for event in self._events(draft, step))])

    def end(self, draft: Draft) -> bytes:
        """See `Exchange`."""
        closing = [event for step in list(self._parts.end()) for event in self._events(draft, step)]
        self._keep(draft)
        status = self._status()
        last = self._event(f"response.{status}", response=self._response(draft, status))
        return b"".join([*self._first(draft), *closing, last])

    def failed(self, draft: Draft, refusal: Refusal) -> bytes:
        """See `Exchange`. The second event is the one at which clients raise."""
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        failed = self._event("response.failed", response={**self._response(draft, "failed"), "error": error})
        return failed + self._event("error", **error, param=None, error=error)

    def _keep(self, draft: Draft) -> None:
        if self._body.get("store") is not False:
            answer = dict(draft.choices[0].message) if draft.choices else {}
            self._conversations.keep(draft.response_id, self._owner, [*self._said, {**answer, "role": "assistant"}])

    def _status(self) -> str:
        return "incomplete" if self._parts.finish_reason in _CUT else "completed"

    def _response(self, draft: Draft, status: str) -> dict[str, Any]:
        done = status in {"completed", "incomplete"}
        cut = _CUT.get(self._parts.finish_reason or "") if status == "incomplete" else None
        return {
            "id": draft.response_id,
            "object": "response",
            "created_at": draft.start_ns // 1_000_000_000,
            "status": status,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "model": draft.policy,
            "output": [_item(draft, part, "completed") for part in self._parts.parts] if done else [],
            "usage": self._usage(draft) if done else None,
            **{
                name: default if self._body.get(name) is None else self._body[name] for name, default in _ECHOED.items()
            },
        }

    def _usage(self, draft: Draft) -> dict[str, Any]:
        prompt, drawn, cached = self._parts.usage(draft)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + drawn,
        }

    def _first(self, draft: Draft) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response(draft, "in_progress"))

    def _event(self, name: str, /, **data: Any) -> bytes:
        return named_event(name, {**data, "sequence_number": next(self._numbers)})

    def _events(self, draft: Draft, step: Step) -> Iterator[bytes]:
        what, part, text = step
        inner: dict[str, Any] = {"output_index": part.index, "item_id": _item_id(draft, part)}
        if part.kind != "tool":
            inner["content_index"] = 0
        if what == "open":
            empty: dict[str, Any] = {"arguments": ""} if part.kind == "tool" else {"content": []}
            item = {**_item(draft, part, "in_progress"), **empty}
            yield self._event("response.output_item.added", output_index=part.index, item=item)
            if part.kind != "tool":
                yield self._event("response.content_part.added", **inner, part=_content(part))
        elif what == "more":
            logprobs: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            yield self._event(f"{_NAMES[part.kind]}.delta", **inner, delta=text, **logprobs)
        else:
            yield self._event(f"{_NAMES[part.kind]}.done", **inner, **_whole(part))
            if part.kind != "tool":
                yield self._event("response.content_part.done", **inner, part=_content(part))
            item = _item(draft, part, "completed")
            yield self._event("response.output_item.done", output_index=part.index, item=item)


_NAMES: Final = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "tool": "response.function_call_arguments",
}


def _whole(part: Part) -> dict[str, Any]:
    if part.kind == "tool":
        return {"arguments": part.text, "name": part.name}
    return {"text": part.text, "logprobs": part.logprobs} if part.kind == "text" else {"text": part.text}


def _item_id(draft: Draft, part: Part) -> str:
    prefix = {"text": "msg", "reasoning": "rs", "tool": "fc"}[part.kind]
    return f"{prefix}_{draft.response_id.removeprefix('resp_')}_{part.index}"


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _item(draft: Draft, part: Part, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _item_id(draft, part), "status": status}
    if part.kind == "tool":
        call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
        return {**item, "type": "function_call", **call}
    if part.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": [_content(part)]}
    return {**item, "type": "message", "role": "assistant", "content": [_content(part)]}
