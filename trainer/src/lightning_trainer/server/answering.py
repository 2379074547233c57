"""One request being answered by the embedded engine: pieces in, chunks or one reply out, the record beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_trainer.engine import Sampled
from lightning_trainer.server.ask import Ask
from lightning_trainer.server.chat import ChatFormat
from lightning_trainer.server.draft import ChoiceDraft, Draft
from lightning_trainer.server.hermes import StreamParser
from lightning_trainer.server.outlet import Outlet
from lightning_trainer.server.replies import Replies, tool_call_deltas


class Answering:
    """Collects what is drawn for one request and sends it on."""

    def __init__(self, ask: Ask, draft: Draft, chat: ChatFormat, outlet: Outlet) -> None:
        self._ask = ask
        self._draft = draft
        self._chat = chat
        self._outlet = outlet
        self._replies = Replies(ask, draft, chat)
        self._parsers = [StreamParser(tools=bool(ask.tools)) for _ in range(ask.n)]
        self._rests: list[str] = []  # content held back until an answer is whole, by choice
        draft.choices = [ChoiceDraft(index, [], []) for index in range(ask.n)]

    async def take(self, index: int, piece: Sampled) -> None:
        """Take a piece of one choice; in a stream, send it."""
        choice = self._draft.choices[index]
        choice.add(piece.token_ids, piece.logprobs)
        choice.finish_reason = piece.finish_reason
        content = self._parsers[index].feed(piece.text)
        if not self._ask.stream:
            return
        if not self._outlet.started:
            await self._outlet.chunk(self._replies.first_chunk())
        if content or self._ask.logprobs or self._ask.token_ids:
            delta = {"content": content} if content else {}
            await self._outlet.chunk(self._replies.chunk(index, delta, ids=piece.token_ids, logprobs=piece.logprobs))

    def close(self) -> None:
        """Every choice is whole: read its tool calls, finish its record."""
        for choice, parser in zip(self._draft.choices, self._parsers, strict=True):
            rest, answer = parser.close()
            if answer.tool_calls:
                answer = replace(answer, tool_calls=answer.tool_calls[:1]) if self._ask.one_call else answer
                choice.finish_reason = "tool_calls"
            elif choice.finish_reason == "stop" and self._ask.stop:
                choice.stopped_by = self._stopped_by(choice)
            choice.message = answer.message()
            self._rests.append(rest)

    def _stopped_by(self, choice: ChoiceDraft) -> str | None:
        """Give the stop string that ended an answer; None when the model ended it."""
        drawn = self._chat.decode(choice.token_ids or ())
        return min((stop for stop in self._ask.stop if stop in drawn), key=drawn.find, default=None)

    def cut(self) -> None:
        """The answer ended early: keep the text drawn so far in the record."""
        for choice, parser in zip(self._draft.choices, self._parsers, strict=True):
            choice.message = choice.message or {"role": "assistant", "content": parser.text}

    async def send(self) -> None:
        """Send the whole reply, or the end of the stream."""
        if self._ask.stream:
            await self._outlet.last(self._last_chunks())
        else:
            await self._outlet.whole(self._replies.whole())

    def _last_chunks(self) -> Sequence[dict[str, Any]]:
        chunks = [] if self._outlet.started else [self._replies.first_chunk()]
        for choice, rest in zip(self._draft.choices, self._rests, strict=True):
            delta: dict[str, Any] = {"content": rest} if rest else {}
            if calls := choice.message.get("tool_calls"):
                delta["tool_calls"] = tool_call_deltas(calls)
            if delta:
                chunks.append(self._replies.chunk(choice.index, delta))
            chunks.append(self._replies.last_chunk(choice))
        if self._ask.include_usage:
            chunks.append(self._replies.usage_chunk())
        return chunks
