"""The messages up to a response and its items, for requests that name them by their ids alone.

Kept in memory, within a bound. A message that several responses of a conversation have in common is kept once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_spans.schema.json import dumps, loads
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.request.fields import format_value, wrong
from lightning_trainer.gateway.surfaces.responses_request import is_reference

_MOST_BYTES: Final = 64_000_000
_OVERHEAD: Final = 400  # bytes of a message besides its text, approximately
_DROPPED_KEPT: Final = 100_000  # ids of responses that were dropped for others, to be able to say so


@dataclass(slots=True, eq=False)
class _Message:
    """A message, after others."""

    text: bytes = b""
    before: _Message | None = None  # None: this is no message, but where the conversations of an owner begin
    after: dict[bytes, _Message] = field(default_factory=dict)
    responses: int = 0  # those whose conversation ends here

    @property
    def size(self) -> int:
        return len(self.text) + _OVERHEAD

    def conversation(self) -> Iterator[bytes]:
        """Yield the messages up to this one, from the last to the first."""
        message = self
        while message.before is not None:
            yield message.text
            message = message.before


@dataclass(slots=True)
class _OwnerMemory:
    """The responses of an attempt or tenant: the last message of each, and its items. The oldest are first."""

    start: _Message = field(default_factory=_Message)
    responses: dict[str, tuple[_Message, bytes]] = field(default_factory=dict)
    size: int = 0

    def add(self, response_id: str, messages: Iterable[bytes], items: bytes) -> None:
        """Keep a response."""
        last = self.start
        for text in messages:
            if text not in last.after:
                last.after[text] = _Message(text, last)
                self.size += last.after[text].size
            last = last.after[text]
        last.responses += 1
        self.responses[response_id] = last, items
        self.size += len(items)

    def drop(self, response_id: str) -> None:
        """Drop a response, with the messages that no other one needs."""
        message, items = self.responses.pop(response_id)
        message.responses -= 1
        self.size -= len(items)
        while message.before is not None and not message.responses and not message.after:
            del message.before.after[message.text]
            self.size -= message.size
            message = message.before


class Conversations:
    """Messages and items by response id. Those of one attempt or tenant are never given to another."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._owned: OrderedDict[str | None, _OwnerMemory] = OrderedDict()  # the least recently kept first
        self._dropped: OrderedDict[tuple[str | None, str], None] = OrderedDict()
        self._size = 0

    def before(self, response_id: Any, owner: str | None) -> list[dict[str, Any]]:
        """Return the messages up to a response, including its own.

        Args:
            response_id: None: nothing came before.
            owner: the requesting attempt or tenant; see `Grant.conversations`.

        Raises:
            Refusal: it is unknown: another owner's, dropped, from before a restart, or made with ``store: false``.
        """
        if response_id is None:
            return []
        if not isinstance(response_id, str):
            raise wrong("previous_response_id", response_id, "the id of a response")
        kept = self._find(response_id, owner)
        if kept is None:
            what, advice = f"previous response {response_id!r}", "Send the whole conversation."
            raise self._unknown(response_id, owner, what, advice, "previous_response_not_found")
        return [loads(text) for text in kept[0].conversation()][::-1]

    def resolve(self, given: Any, owner: str | None) -> Any:
        """Return an input with the items of earlier responses in place of references to them.

        Raises:
            Refusal: one is unknown; see `before`.
        """
        if not isinstance(given, list):
            return given
        return [
            self._item(item.get("id"), owner, f"input[{at}]") if is_reference(item) else item
            for at, item in enumerate(given)
        ]

    def _item(self, item_id: Any, owner: str | None, where: str) -> Any:
        response_id = f"resp_{str(item_id).partition('_')[2].rpartition('_')[0]}"  # see `_item_id` of the responses
        kept = self._find(response_id, owner)
        for item in [] if kept is None else loads(kept[1]):
            if item["id"] == item_id:
                return item
        what = f"{where}: item_reference {format_value(item_id)}: the item"
        advice = "Send the items themselves. In Vercel's AI SDK, set providerOptions.openai.store to false."
        raise self._unknown(response_id, owner, what, advice, "item_not_found")

    def _find(self, response_id: str, owner: str | None) -> tuple[_Message, bytes] | None:
        owned = self._owned.get(owner)
        return None if owned is None else owned.responses.get(response_id)

    def _unknown(self, response_id: str, owner: str | None, what: str, advice: str, code: str) -> Refusal:
        """Return the refusal of what is not kept: a 503 if it was dropped for others, by no fault of the sender."""
        if (owner, response_id) not in self._dropped:
            return bad_request(f"{what} is not known here, or no longer. {advice}", code)
        message = (
            f"{what} was dropped: other attempts needed the memory, {self._most_bytes / 1e6:g} MB in total."
            f" Run fewer attempts at once. {advice}"
        )
        return Refusal(503, message, "server_error", code, {"x-should-retry": "false"})

    def keep(
        self,
        response_id: str,
        owner: str | None,
        messages: list[dict[str, Any]],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep the messages up to a response, and its items.

        If there is no room, the oldest responses of those who have more than a quarter of it are dropped, then of those
        who kept nothing for longest.
        """
        owned = self._owned.setdefault(owner, _OwnerMemory())
        self._owned.move_to_end(owner)
        self._size -= owned.size
        owned.add(response_id, map(dumps, messages), dumps(list(items)))
        self._size += owned.size
        while self._size > self._most_bytes and (len(self._owned) > 1 or len(owned.responses) > 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        owner, owned = max(self._owned.items(), key=lambda each: each[1].size)
        is_large = owned.size > self._most_bytes // 4
        if not is_large:
            owner, owned = next(iter(self._owned.items()))
        response_id = next(iter(owned.responses))
        self._size -= owned.size
        owned.drop(response_id)
        self._size += owned.size
        if not owned.responses:
            del self._owned[owner]
        if not is_large or (not owned.responses and self._owned):  # not even its last one fits next to the others
            self._dropped[owner, response_id] = None
        while len(self._dropped) > _DROPPED_KEPT:
            self._dropped.popitem(last=False)

    def forget(self, owner: str) -> None:
        """Drop an attempt's messages; it has ended."""
        if (owned := self._owned.pop(owner, None)) is not None:
            self._size -= owned.size
            for response_id in list(owned.responses):  # messages refer to each other: collecting them takes long
                owned.drop(response_id)
