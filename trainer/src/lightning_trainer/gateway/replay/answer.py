"""Answers from the record: whole or as a stream, on every surface, with the recorded tokens; errors too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from starlette.types import Send

from lightning_spans.adapter.trace import Node
from lightning_spans.schema import spans as names
from lightning_spans.schema.calls import Choice
from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.calls.answers import Record
from lightning_trainer.gateway.calls.generation import tool_call_deltas
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.asgi import send_bytes
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.events import named_event
from lightning_trainer.gateway.replay.record import RecordedCall
from lightning_trainer.gateway.request.pending import PendingCall, PendingChoice, SampledCall
from lightning_trainer.reasons.call_errors import CUT_CALLS

HEADER: Final = "x-lightning-replay"
_PIECES: Final = re.compile(r"\s*\S+\s*|\s+")  # pieces of a streamed text: words
_STATUS: Final = "http.response.status_code"
_ONCE: Final = {"x-should-retry": "false"}  # all of the client's tries are one call of the record
# The openai client's exceptions for a call without an answer, and what it is sent in a replay to raise the same.
_UNANSWERED: Final[Mapping[str, str]] = {"APITimeoutError": "timeout", "APIConnectionError": "connection"}
_STREAMED: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
Decode = Callable[[Sequence[int]], str]


class LivePolicy(Protocol):
    """What answers when nothing is replayed."""

    def remember(self, pending: PendingCall) -> None:
        """Note a call that was answered from a record."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; empty if it is unknown."""
        ...


def fill(pending: PendingCall, call: RecordedCall) -> None:
    """Copy the recorded call to a call's record: its tokens, its policy, its parameters."""
    node, answer = call.node, call.node.answer
    pending.routed = replace(pending.routed, policy=answer.model or pending.routed.policy)
    pending.sampled = SampledCall(
        policy_version=node.policy_version or 0,
        response_id=answer.response_id or None,
        prompt_token_ids=answer.prompt_token_ids,
        choices=[_pending_choice(choice) for choice in answer.choices],
        sampling=dict(node.call.sampling) if node.call is not None else {},
    )


def _pending_choice(choice: Choice) -> PendingChoice:
    return PendingChoice(
        choice.index,
        None if choice.token_ids is None else list(choice.token_ids),
        None if choice.logprobs is None else list(choice.logprobs),
        choice.finish_reason,
        choice.message,
    )


@dataclass(eq=False)
class SentError(Refusal):
    """An error that an agent's client got from its endpoint.

    Attributes:
        sent: the body as it arrived.
    """

    sent: str = ""

    def body(self) -> bytes:
        """Return that body."""
        return self.sent.encode()


def error_of(node: Node) -> Refusal | None:
    """Return the error with which a recorded call was answered; None if it was no error."""
    call, told_of = node.call, node.span.attributes
    status, sent = told_of.get(_STATUS), told_of.get(names.RESPONSE)
    if node.span.status == "error" and isinstance(status, int) and isinstance(sent, str):
        return SentError(status, str(node.error), headers=_ONCE, sent=sent)
    if (what := _UNANSWERED.get(str(told_of.get(names.ERROR_TYPE)))) is not None:
        return Refusal(500, str(node.error), "server_error", headers={**_ONCE, HEADER: what})
    if call is not None and call.error is None and call.choices:
        return None  # the client repeats its own failure to parse it
    if node.error is None:
        return None
    told = call.sampling.get("error") if call is not None else None
    told = told if isinstance(told, Mapping) else {}
    status = told.get("status", told_of.get(_STATUS, 500))
    text = (call.error if call is not None else None) or node.error
    return Refusal(
        int(status) if str(status).isdigit() and 400 <= int(status) < 600 else 500,
        str(text),
        str(told.get("type") or "server_error"),
        told.get("code"),
        _ONCE,
    )


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Answers one request from the record, instead of a policy.

    Args:
        call: the recorded call.
        policy: continues after the replay; None: the program's own endpoint does.
    """

    call: RecordedCall
    policy: LivePolicy | None = None

    async def answer(self, pending: PendingCall, sender: ResponseSender, record: Record) -> None:
        """Send the recorded answer.

        Raises:
            Refusal: the recorded answer is an error.
        """
        fill(pending, self.call)
        node = self.call.node
        streams = pending.requested.request.get("stream") is True
        if self.policy is not None:
            self.policy.remember(pending)
        completion = _completion(pending, node, self.call.body, None if self.policy is None else self.policy.decode)
        cut = node.call is not None and node.call.error in CUT_CALLS
        if self.call.is_left:
            if streams and any(choice.message for choice in pending.sampled.choices):
                await sender.chunks(list(_chunks(pending, completion, whole=False)))
            await asyncio.Event().wait()  # its agent is cancelled again
        refusal = None if cut and streams and pending.sampled.choices else error_of(node)
        if refusal is not None:
            # the connection broke in the middle
            if streams and any(choice.message for choice in pending.sampled.choices):
                await sender.chunks(list(_chunks(pending, completion, whole=False)))
            raise refusal
        await record(pending)
        if streams:
            await sender.last(list(_chunks(pending, completion, whole=not cut)))
        else:
            await sender.whole(completion)


async def say(text: str, pending: PendingCall, sender: ResponseSender, record: Record) -> None:
    """Answer a request with the user's text."""
    number = pending.requested.request.get("n")
    count = number if isinstance(number, int) and number > 0 else 1
    message = {"role": "assistant", "content": text}
    pending.sample(choices=[PendingChoice(index, None, None, "stop", message) for index in range(count)])
    completion = _completion(pending, None, None, None)
    await record(pending)
    if pending.requested.request.get("stream") is True:
        await sender.last(list(_chunks(pending, completion, whole=True)))
    else:
        await sender.whole(completion)


def _completion(
    pending: PendingCall, node: Node | None, body: Mapping[str, Any] | None, decode: Decode | None
) -> dict[str, Any]:
    """Build a whole chat completion."""
    sent = body or {}
    shows, ids = (
        pending.requested.request.get("logprobs") is True,
        pending.requested.request.get("return_token_ids") is True,
    )
    by_index = {
        choice.get("index", place): choice
        for place, choice in enumerate(sent.get("choices") or ())
        if isinstance(choice, Mapping)
    }
    choices = []
    for choice in pending.sampled.choices:
        told = by_index.get(choice.index, {})
        out: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", **choice.message},
            "logprobs": (_logprobs(choice, decode) or told.get("logprobs")) if shows else None,
            "finish_reason": choice.finish_reason,
        }
        if told.get("stop_reason") is not None:
            out["stop_reason"] = told["stop_reason"]
        if ids:
            out["token_ids"] = choice.token_ids
        choices.append(out)
    completion = {
        "id": pending.response_id,
        "object": "chat.completion",
        "created": sent.get("created")
        or (node.span.start_ns if node is not None else pending.requested.start_ns) // 10**9,
        "model": sent.get("model") or pending.routed.policy,
        "system_fingerprint": sent.get("system_fingerprint")
        or f"{pending.routed.policy}-{pending.sampled.policy_version}",
        "choices": choices,
        "usage": _usage(pending, node, sent),
    }
    return {**completion, "prompt_token_ids": list(pending.sampled.prompt_token_ids or ())} if ids else completion


def _usage(pending: PendingCall, node: Node | None, sent: Mapping[str, Any]) -> dict[str, Any]:
    known = sent.get("usage")
    if isinstance(known, dict) and "prompt_tokens" in known:
        return known
    told = node.span.attributes if node is not None else {}
    prompt, drawn = told.get(names.INPUT_TOKENS), told.get(names.OUTPUT_TOKENS)
    prompt = len(pending.sampled.prompt_token_ids or ()) if prompt is None else prompt
    drawn = sum(len(choice.token_ids or ()) for choice in pending.sampled.choices) if drawn is None else drawn
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _logprobs(choice: PendingChoice, decode: Decode | None) -> dict[str, Any] | None:
    if decode is None or choice.token_ids is None or choice.logprobs is None:
        return None
    tokens: list[dict[str, Any]] = [
        {"token": decode([token]), "logprob": max(logprob, -9999.0), "bytes": None, "top_logprobs": []}
        for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
    ]
    for token in tokens:
        if "\N{REPLACEMENT CHARACTER}" not in token["token"]:
            token["bytes"] = list(token["token"].encode())
    return {"content": tokens, "refusal": None}


def _chunks(pending: PendingCall, completion: Mapping[str, Any], *, whole: bool) -> Iterator[dict[str, Any]]:
    """Split a completion into the chunks of a stream: the role, the texts by words, the tool calls, the end."""
    counts = pending.requested.wants_usage
    head = {name: value for name, value in completion.items() if name not in {"choices", "usage", "prompt_token_ids"}}
    head |= {"object": "chat.completion.chunk"} | ({"usage": None} if counts else {})

    def chunk(index: int, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}

    for choice in completion["choices"]:
        index, message = choice["index"], choice["message"]
        first = chunk(index, {"role": "assistant", "content": ""})
        if "prompt_token_ids" in completion:
            first["prompt_token_ids"] = completion["prompt_token_ids"]
        yield first
        told = {"logprobs": choice["logprobs"], **({"token_ids": choice["token_ids"]} if "token_ids" in choice else {})}
        if any(told.values()):
            yield chunk(index, {}, **told)
        for field in ("reasoning_content", "reasoning", "refusal", "content"):
            text = message.get(field)
            for piece in _PIECES.findall(text) if isinstance(text, str) else ():
                yield chunk(index, {field: piece})
        if calls := message.get("tool_calls"):
            yield chunk(index, {"tool_calls": tool_call_deltas(calls)})
        if whole:
            stop = {"stop_reason": choice["stop_reason"]} if "stop_reason" in choice else {}
            yield chunk(index, {}, finish_reason=choice["finish_reason"], **stop)
    if counts and whole:
        yield {**head, "choices": [], "usage": completion["usage"]}


def is_verbatim(call: RecordedCall, path: str) -> bool:
    """Whether a recorded answer is sent as received: from an agent's own endpoint, on the requested surface."""
    endpoint = call.node.span.attributes.get(names.ENDPOINT)
    items = any("output" in choice.message for choice in call.node.answer.choices)  # of Responses, as they arrived
    own = (call.node.call is None or items) and call.body is not None and call.node.error is None
    return own and isinstance(endpoint, str) and path == f"/v1{endpoint}"


async def send_verbatim(call: RecordedCall, pending: PendingCall, send: Send, record: Record, path: str) -> bool:
    """Send a recorded answer as its agent received it.

    Returns:
        False if it must be sent as a stream of the kind that `RecordedAnswer` creates; then nothing was sent.
    """
    streams = pending.requested.request.get("stream") is True
    if streams and path != "/v1/responses":
        return False
    fill(pending, call)
    await record(pending)
    body = call.body or {}
    if not streams:
        await send_bytes(send, dumps(body))
        return True
    await send({"type": "http.response.start", "status": 200, "headers": _STREAMED})
    await send({"type": "http.response.body", "body": b"".join(_response_events(body))})
    return True


def _response_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """Split a response into the events of a stream, as OpenAI sends them."""
    number = iter(range(1 << 30))

    def event(what: str, **data: Any) -> bytes:
        return named_event(what, {**data, "sequence_number": next(number)})

    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for place, item in enumerate(response.get("output") or ()):
        inner: dict[str, Any] = {"output_index": place, "item_id": item.get("id")}
        kind = item.get("type")
        empty: dict[str, Any] = (
            {"content": []} if kind == "message" else {"arguments": ""} if kind == "function_call" else {}
        )
        yield event("response.output_item.added", output_index=place, item={**item, **empty})
        if kind == "function_call":
            arguments = item.get("arguments") or ""
            yield event("response.function_call_arguments.delta", **inner, delta=arguments)
            yield event("response.function_call_arguments.done", **inner, arguments=arguments, name=item.get("name"))
        for part_place, part in enumerate(item.get("content") or () if kind == "message" else ()):
            at = {**inner, "content_index": part_place}
            text = part.get("text")
            cleared = {**part, "text": ""} if text is not None else part
            yield event("response.content_part.added", **at, part=cleared)
            for piece in _PIECES.findall(text or ""):
                yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
            if text is not None:
                yield event("response.output_text.done", **at, text=text, logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=place, item=item)
    status = response.get("status") or "completed"
    yield event(f"response.{status}", response=dict(response))
