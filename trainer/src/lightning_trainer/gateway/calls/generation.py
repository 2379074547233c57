"""One request while the embedded engine answers it: pieces in, chunks or one reply out, and the record.

Chat completions are in OpenAI's format with vLLM's token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.engine import STEERED, SampledPiece
from lightning_trainer.gateway.formats.reader import AnswerReader, Dialect
from lightning_trainer.gateway.formats.unread import unread
from lightning_trainer.gateway.prompt.marked_text import MarkedText
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.gateway.request.chat_request import ChatRequest
from lightning_trainer.gateway.request.pending import PendingCall, PendingChoice
from lightning_trainer.reasons.continuation import MALFORMED, UNREAD


class Generation:
    """Collects what is sampled for one request and sends it on."""

    def __init__(
        self, request: ChatRequest, pending: PendingCall, chat: ChatFormat, sender: ResponseSender, prompt: str | None
    ) -> None:
        self._request = request
        self._pending = pending
        self._chat = chat
        self._sender = sender
        self._replies = CompletionBuilder(request, pending, chat)
        self._texts: list[MarkedText | None] = [None] * request.n
        if prompt is None:  # text is sent as text
            self._readers = [AnswerReader(Dialect()) for _ in range(request.n)]
        else:
            opened = chat.opened(prompt)
            self._readers = [chat.reader(request.tools, opened=opened) for _ in range(request.n)]
            self._texts = [chat.text_of(request.stop) for _ in range(request.n)]
        # reasoning and content that are held back until an answer is complete, by choice
        self._rests: list[tuple[str, str]] = []
        self._choices = [PendingChoice(index, [], []) for index in range(request.n)]
        self._oldest: int | None = None  # version that sampled one of the pieces
        self._steered: dict[str, list[int]] = {}  # positions of steered tokens, by choice
        self._unread: dict[str, str] = {}  # why tool calls could not be parsed, by choice
        pending.sample(choices=self._choices)

    async def take(self, index: int, piece: SampledPiece) -> None:
        """Add a piece of one choice; in a stream, send it."""
        choice = self._choices[index]
        choice.add(piece.token_ids, piece.logprobs)
        choice.finish_reason = piece.finish_reason
        if piece.version is not None and (self._oldest is None or piece.version < self._oldest):
            self._oldest = piece.version
            self._pending.sample(policy_version=piece.version)
        if any(piece.steered):
            first = len(choice.token_ids or ()) - len(piece.token_ids)
            places = self._steered.setdefault(str(index), [])
            places += [first + place for place, steered in enumerate(piece.steered) if steered]
        reader, text = self._readers[index], self._texts[index]
        thinks = reader.thinks
        reasoning, content = reader.feed(piece.text if text is None else text.push(piece.token_ids))
        choice.reasoning_tokens += len(piece.token_ids) * (thinks or reader.thinks)
        if not self._request.stream:
            return
        if not self._sender.started:
            await self._sender.chunk(self._replies.first_chunk())
        if reasoning or content or self._request.logprobs or self._request.token_ids:
            delta = _delta(reasoning, content)
            await self._sender.chunk(self._replies.chunk(index, delta, ids=piece.token_ids, logprobs=piece.logprobs))

    def close(self) -> None:
        """End every choice: parse its tool calls and finish its record."""
        for choice, reader, text in zip(self._choices, self._readers, self._texts, strict=True):
            last = ("", "") if text is None else reader.feed(text.finish())
            rest, answer = reader.close()
            rest = (last[0] + rest[0], last[1] + rest[1])
            if answer.tool_calls:
                answer = replace(answer, tool_calls=answer.tool_calls[:1]) if self._request.one_call else answer
                choice.finish_reason = "tool_calls"
            elif self._request.tools and (named := unread(answer.content, self._request.tools)):
                own = self._chat.calls is not None and named == self._chat.calls.name
                self._unread[str(choice.index)] = MALFORMED if own else named
            if not answer.tool_calls and choice.finish_reason == "stop" and self._request.stop:
                choice.stopped_by = self._stopped_by(choice)
            choice.message = answer.message()
            self._rests.append(rest)
        self._note()

    def _note(self) -> None:
        if self._steered:
            self._pending.note(**{STEERED: self._steered})
        if self._unread:
            self._pending.note(**{UNREAD: self._unread})

    def _stopped_by(self, choice: PendingChoice) -> str | None:
        """Return the stop string that ended an answer; None if the model ended it."""
        drawn = self._chat.decode(choice.token_ids or ())
        return min((stop for stop in self._request.stop if stop in drawn), key=drawn.find, default=None)

    def cut(self) -> None:
        """Note that the answer ended early: keep the text sampled so far in the record."""
        for choice, reader in zip(self._choices, self._readers, strict=True):
            choice.message = choice.message or reader.partial.message()
        self._note()

    async def send(self) -> None:
        """Send the whole reply, or the end of the stream."""
        if self._request.stream:
            await self._sender.last(self._last_chunks())
        else:
            await self._sender.whole(self._replies.whole())

    def _last_chunks(self) -> Sequence[dict[str, Any]]:
        chunks = [] if self._sender.started else [self._replies.first_chunk()]
        for choice, rest in zip(self._choices, self._rests, strict=True):
            delta: dict[str, Any] = _delta(*rest)
            if calls := choice.message.get("tool_calls"):
                delta["tool_calls"] = tool_call_deltas(calls)
            if delta:
                chunks.append(self._replies.chunk(choice.index, delta))
            chunks.append(self._replies.last_chunk(choice))
        if self._request.include_usage:
            chunks.append(self._replies.usage_chunk())
        return chunks


def _delta(reasoning: str, content: str) -> dict[str, Any]:
    return {**({"reasoning_content": reasoning} if reasoning else {}), **({"content": content} if content else {})}


class CompletionBuilder:
    """Builds the responses to one request."""

    def __init__(self, request: ChatRequest, pending: PendingCall, chat: ChatFormat) -> None:
        self._request = request
        self._pending = pending
        self._chat = chat
        self._head = {
            "id": pending.response_id,
            "created": pending.requested.start_ns // 1_000_000_000,
            "model": pending.routed.policy,
            "system_fingerprint": f"{pending.routed.policy}-{pending.sampled.policy_version}",  # which weights answered
        }

    def whole(self) -> dict[str, Any]:
        """Return the whole completion."""
        reply = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in self._pending.sampled.choices],
            "usage": self.usage(),
        }
        if self._request.token_ids:
            reply["prompt_token_ids"] = list(self._pending.sampled.prompt_token_ids or ())
        return reply

    def _choice(self, choice: PendingChoice) -> dict[str, Any]:
        ids, logprobs = choice.token_ids or [], choice.logprobs or []
        out = {
            "index": choice.index,
            "message": {**choice.message, "refusal": None},
            "logprobs": self._logprobs(ids, logprobs) if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.stopped_by is not None:
            out["stop_reason"] = choice.stopped_by  # vLLM's name for it
        if self._request.token_ids:
            out["token_ids"] = ids
        return out

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        return {
            "content": [self._logprob(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)],
            "refusal": None,
        }

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._chat.decode([token])
        whole = "\N{REPLACEMENT CHARACTER}" not in text  # the bytes of part of a character are not known
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),  # OpenAI's minimum; infinities are not valid JSON
            "bytes": list(text.encode()) if whole else None,
            "top_logprobs": [],
        }

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return a chunk with one choice's new content."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(ids, logprobs) if self._request.logprobs and ids else None,
            "finish_reason": None,
        }
        if self._request.token_ids:
            choice["token_ids"] = list(ids)
        return self._chunk([choice])

    def last_chunk(self, choice: PendingChoice) -> dict[str, Any]:
        """Return the chunk that ends a choice."""
        ended: dict[str, Any] = {"index": choice.index, "delta": {}, "logprobs": None}
        ended["finish_reason"] = choice.finish_reason
        if choice.stopped_by is not None:
            ended["stop_reason"] = choice.stopped_by
        if self._request.token_ids:
            ended["token_ids"] = []
        return self._chunk([ended])

    def first_chunk(self) -> dict[str, Any]:
        """Return the chunk that begins every choice."""
        opened = {"role": "assistant", "content": ""}
        choices = [
            {"index": choice.index, "delta": opened, "logprobs": None, "finish_reason": None}
            for choice in self._pending.sampled.choices
        ]
        chunk = self._chunk(choices)
        if self._request.token_ids:
            chunk["prompt_token_ids"] = list(self._pending.sampled.prompt_token_ids or ())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk, with token counts."""
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def usage(self) -> dict[str, Any]:
        """Count the tokens of all choices together."""
        prompt = len(self._pending.sampled.prompt_token_ids or ())
        drawn = sum(len(choice.token_ids or ()) for choice in self._pending.sampled.choices)
        thought = sum(choice.reasoning_tokens for choice in self._pending.sampled.choices)
        counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return {**counts, "completion_tokens_details": {"reasoning_tokens": thought}} if thought else counts


def tool_call_deltas(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls as in a chunk: with their position among the calls of the answer."""
    return [{"index": at, **call} for at, call in enumerate(calls)]
