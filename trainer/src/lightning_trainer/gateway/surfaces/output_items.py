"""An answer as a sequence of parts (reasoning, text, tool calls), from chunks or from a whole completion.

Surfaces that send an answer part by part use this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lightning_spans.chat.stream import begins_another
from lightning_trainer.gateway.request.pending import PendingCall


@dataclass(slots=True)
class OutputItem:
    """A part of an answer; a tool call's text is its arguments."""

    kind: Literal["reasoning", "text", "tool"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)


Step: TypeAlias = tuple[Literal["open", "more", "close"], OutputItem, str]


class OutputItems:
    """The parts of an answer's single choice, as they arrive.

    Args:
        reasoning: False leaves reasoning out. An answer without other parts then has an empty text.
    """

    def __init__(self, *, reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self.parts: list[OutputItem] = []
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None  # the stop string that ended it, if the engine reports it
        self._usage: Mapping[str, Any] = {}
        self._current: OutputItem | None = None
        self._logprobs: list[Any] = []  # that came before the text to which they belong
        self._calls: dict[int, OutputItem] = {}

    @classmethod
    def of(cls, completion: Mapping[str, Any], *, reasoning: bool = True) -> OutputItems:
        """Read a whole completion."""
        parts = cls(reasoning=reasoning)
        for _ in (*parts.take(completion), *parts.end()):
            pass
        return parts

    def take(self, reply: Mapping[str, Any]) -> Iterator[Step]:
        """Read a chunk, or a whole completion; return what is new, in order."""
        self._usage = reply.get("usage") or self._usage
        for choice in reply.get("choices") or ():
            delta = choice.get("message") or choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if isinstance(reasoning, str) and self._reasoning:
                yield from self._grow("reasoning", reasoning)
            for name in ("content", "refusal"):
                if isinstance(delta.get(name), str):
                    yield from self._grow("text", delta[name])
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            if self._current is not None and self._current.kind == "text":
                self._current.logprobs += self._logprobs
                self._logprobs = []
            for at, call in enumerate(delta.get("tool_calls") or ()):
                yield from self._call(call.get("index", at), call)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            stopped_by = choice.get("stop_reason")  # vLLM's: a string, or the id of a token
            self.stopped_by = stopped_by if isinstance(stopped_by, str) else self.stopped_by

    def end(self) -> Iterator[Step]:
        """Close the last part."""
        if not self.parts and not self._reasoning:
            yield from self._open(OutputItem("text", 0))
        yield from self._close()

    def _close(self) -> Iterator[Step]:
        if self._current is not None:
            yield "close", self._current, ""
            self._current = None

    def usage(self, pending: PendingCall) -> tuple[int, int, int]:
        """Return the tokens of prompt and answer, and how many of the prompt came from a cache."""
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt = self._usage.get("prompt_tokens")
        drawn = self._usage.get("completion_tokens")
        return (
            len(pending.sampled.prompt_token_ids or ()) if prompt is None else prompt,
            sum(len(choice.token_ids or ()) for choice in pending.sampled.choices) if drawn is None else drawn,
            cached,
        )

    def _grow(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if not text:
            return
        if self._current is None or self._current.kind != kind:
            yield from self._open(OutputItem(kind, len(self.parts)))
        yield from self._more(self.parts[-1], text)

    def _call(self, number: int, call: Mapping[str, Any]) -> Iterator[Step]:
        function = call.get("function") or {}
        part = self._calls.get(number)
        if part is None or begins_another({"id": part.call_id}, call):
            part = OutputItem("tool", len(self.parts), call.get("id") or "", function.get("name") or "")
            self._calls[number] = part
            yield from self._open(part)
        if arguments := function.get("arguments"):
            yield from self._more(part, arguments)

    def _open(self, part: OutputItem) -> Iterator[Step]:
        yield from self._close()
        self.parts.append(part)
        self._current = part
        yield "open", part, ""

    def _more(self, part: OutputItem, text: str) -> Iterator[Step]:
        part.pieces.append(text)
        yield "more", part, text
