"""What a process reports to servers about its spans, in a header of its requests."""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """The outcomes of the spans put into a sink."""

    put: int = 0
    delivered: int = 0
    spooled: int = 0
    retried: int = 0  # sent again, from the spool
    sampled_out: int = 0  # left out by the configured sampling rate
    redacted: int = 0  # had something masked
    refused: int = 0  # the destination will never take them: sending them again is useless
    dropped: int = 0


class Reports:
    """The reports of one process, each of which says what is new since the previous one.

    Its requests have the keys of different attempts, so a server could not subtract totals. A report is sent until a
    server has taken it, with the same number, by which a server recognises it.

    Attributes:
        counts: the outcomes so far.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> Counts:
        """Begin again at zero, as another process. Returns the counts."""
        self.counts = Counts()
        self._id = uuid.uuid4().hex[:12]
        self._number = 0
        self._taken = dict.fromkeys(Counts.__slots__, 0)  # the counts that servers know
        self._sent: dict[str, int] | None = None  # the counts when the current report was made
        return self.counts

    def text(self) -> str:
        """Return the current report: ``ID;report=3;delivered=5;dropped=1``."""
        if self._sent is None:
            self._sent = {name: getattr(self.counts, name) for name in self._taken}
            self._number += 1
        news = (f"{name}={count - self._taken[name]}" for name, count in self._sent.items())
        return ";".join([self._id, f"report={self._number}", *news])

    def taken(self) -> None:
        """Note that a server has taken the current report."""
        if self._sent is not None:
            self._taken, self._sent = self._sent, None
