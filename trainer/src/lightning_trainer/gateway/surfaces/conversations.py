"""The messages up to a response and its items, for requests that name them by their ids alone.

Kept in memory, within a bound.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_spans.schema.json import dumps, loads
from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.request.fields import format_value, wrong
from lightning_trainer.gateway.surfaces.responses_request import is_reference

_MOST_BYTES: Final = 64_000_000


class Conversations:
    """Messages and items by response id. Those of one attempt or tenant are never given to another."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str | None, str], tuple[bytes, bytes]] = OrderedDict()
        self._owned: defaultdict[str | None, set[str]] = defaultdict(set)
        self._size = 0

    def before(self, response_id: Any, owner: str | None) -> list[dict[str, Any]]:
        """Return the messages up to a response, including its own.

        Args:
            response_id: None: nothing came before.
            owner: the requesting attempt or tenant; see `Grant.conversations`.

        Raises:
            Refusal: it is unknown: another owner's, too old, from before a restart, or made with ``store: false``.
        """
        if response_id is None:
            return []
        if not isinstance(response_id, str):
            raise wrong("previous_response_id", response_id, "the id of a response")
        kept = self._kept.get((owner, response_id))
        if kept is None:
            raise bad_request(
                f"previous response {response_id!r} is not known here, or no longer. Send the whole conversation.",
                "previous_response_not_found",
            )
        messages: list[dict[str, Any]] = loads(kept[0])
        return messages

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
        _, items = self._kept.get((owner, response_id), (b"", b"[]"))
        for item in loads(items):
            if item["id"] == item_id:
                return item
        raise bad_request(
            f"{where}: item_reference {format_value(item_id)}: no such item is known here, or no longer. Send the"
            " items themselves. In Vercel's AI SDK, set providerOptions.openai.store to false.",
            "item_not_found",
        )

    def keep(
        self,
        response_id: str,
        owner: str | None,
        messages: list[dict[str, Any]],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep the messages up to a response, and its items; the oldest are dropped if there is no room."""
        kept = dumps(messages), dumps(list(items))
        self._kept[owner, response_id] = kept
        self._owned[owner].add(response_id)
        self._size += _size(kept)
        while self._size > self._most_bytes and len(self._kept) > 1:
            (oldest, forgotten), dropped = self._kept.popitem(last=False)
            self._owned[oldest].discard(forgotten)
            self._size -= _size(dropped)

    def forget(self, owner: str) -> None:
        """Drop an attempt's messages; it has ended."""
        for response_id in self._owned.pop(owner, ()):
            self._size -= _size(self._kept.pop((owner, response_id)))


def _size(kept: tuple[bytes, bytes]) -> int:
    return len(kept[0]) + len(kept[1])
