"""Read a streamed chat completion: text is passed on at once, tool calls and token counts when complete."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_openai.foreign.dialect import objects
from lightning_spans.chat.stream import Growing, message_of
from lightning_spans.schema.spans import Json


class ChoiceSoFar:
    """One choice, as far as it has arrived."""

    def __init__(self) -> None:
        self._message = Growing()
        self.finish_reason: str | None = None

    def add(self, choice: Mapping[str, Json]) -> Mapping[str, Json]:
        """Add the choice's part of a chunk; return the delta."""
        delta = choice.get("delta") or {}
        self._message.add({name: value for name, value in delta.items() if name == "tool_calls"})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return delta

    @property
    def calls(self) -> list[Mapping[str, Json]]:
        """The tool calls, complete."""
        return objects(message_of(self._message).get("tool_calls"))


class ChunkReader:
    """The content of the chunks so far.

    Attributes:
        head: fields of the last chunk other than choices and counts: id and model.
        usage: token counts; {} until they arrive.
        choices: by index.
    """

    def __init__(self) -> None:
        self.head: dict[str, Json] = {}
        self.usage: Mapping[str, Json] = {}
        self.choices: dict[int, ChoiceSoFar] = {}

    def take(self, chunk: Mapping[str, Json]) -> list[tuple[int, Mapping[str, Json]]]:
        """Add a chunk; return its deltas, each with the index of its choice."""
        self.head |= {name: chunk[name] for name in ("id", "model", "created") if chunk.get(name) is not None}
        self.usage = chunk.get("usage") or self.usage
        deltas = []
        for choice in objects(chunk.get("choices")):
            index = choice.get("index") or 0
            deltas.append((index, self.choices.setdefault(index, ChoiceSoFar()).add(choice)))
        return deltas
