"""The messages up to a response, for requests that continue it by its id alone. Kept in memory, within a bound."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, Final

from lightning_spans.schema.json import dumps, loads
from lightning_trainer.gateway.http.errors import bad_request
from lightning_trainer.gateway.request.fields import wrong

_MOST_BYTES: Final = 64_000_000


class Conversations:
    """Messages by response id. Those of one attempt or tenant are never given to another."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
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
        text = self._kept.get((owner, response_id))
        if text is None:
            raise bad_request(
                f"previous response {response_id!r} is not known here, or no longer. Send the whole conversation.",
                "previous_response_not_found",
            )
        messages: list[dict[str, Any]] = loads(text)
        return messages

    def keep(self, response_id: str, owner: str | None, messages: list[dict[str, Any]]) -> None:
        """Keep messages; the oldest are dropped if there is no room."""
        text = dumps(messages)
        self._kept[owner, response_id] = text
        self._owned[owner].add(response_id)
        self._size += len(text)
        while self._size > self._most_bytes and len(self._kept) > 1:
            (oldest, forgotten), dropped = self._kept.popitem(last=False)
            self._owned[oldest].discard(forgotten)
            self._size -= len(dropped)

    def forget(self, owner: str) -> None:
        """Drop an attempt's messages; it has ended."""
        for response_id in self._owned.pop(owner, ()):
            self._size -= len(self._kept.pop((owner, response_id)))
