"""The time by which leases run, shared by all users of a database and not affected by clocks that are set."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from sqlalchemy import Connection, bindparam, select, text, update

from lightning_spans.store.sql.database import SQLITE, Database
from lightning_spans.store.sql.schema import lease_clock

_TRUSTED_NS: Final = 10 * 10**9  # the largest difference that is accepted from a clock that may have been set
_WRITTEN_EVERY_NS: Final = 50 * 10**6
_LOOK: Final = select(lease_clock.c.now_ns, lease_clock.c.wrote_ns)
# if it is lost in a crash, leases only last longer
_NO_WAIT_FOR_DISK: Final = text("SET LOCAL synchronous_commit = off")
_WRITE: Final = update(lease_clock).values(now_ns=bindparam("now"), wrote_ns=bindparam("reading"))


class LeaseClock:
    """Counts the nanoseconds during which somebody used the store, starting when the store was created.

    The database holds the count. If this process used it last, it adds what passed on its own monotonic clock, which
    needs no trust in other clocks. If another process wrote last, it adds the difference of two readings of a clock
    that both can read (on PostgreSQL the server's, on SQLite the machine's monotonic one), but never more than passed
    here since the count was last read, nor more than ten seconds. So a clock that is set an hour ahead or back ends no
    lease early by more than that, machines need not agree on the time, and time in which nobody used the store does not
    count: after a restart, runners have the rest of their leases to report.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._state: _ClockReading | None = None
        self._written = -_WRITTEN_EVERY_NS

    def now(self, connection: Connection) -> int:
        """Return the time without writing it."""
        here = time.monotonic_ns()
        seen = self._look(connection, here)
        return seen.held_ns + here - seen.at

    def tick(self, connection: Connection) -> int:
        """Return the time and write it, for the others.

        Args:
            connection: within the one write transaction of this process. On PostgreSQL the time is written in a
                separate
                transaction: one that holds the row until the work is done would make all others wait.
        """
        if connection.dialect.name == SQLITE:
            return self._tick(connection)
        here, seen = time.monotonic_ns(), self._state
        if seen is not None and here - self._written < _WRITTEN_EVERY_NS:
            return seen.held_ns + here - seen.at
        with self._database.writer() as own, own.begin():
            own.execute(_NO_WAIT_FOR_DISK)
            return self._tick(own)

    def _tick(self, connection: Connection) -> int:
        connection.execute(_LOOK.with_for_update())
        here = time.monotonic_ns()
        seen = self._look(connection, here)
        now = seen.held_ns + here - seen.at
        connection.execute(_WRITE, {"now": now, "reading": self._database.elapsing_ns(connection)})
        self._state = _ClockReading(now, here, here)
        self._written = here
        return now

    def _look(self, connection: Connection, here: int) -> _ClockReading:
        """Read the count. Readers that do not write leave our state unchanged, so threads may read."""
        found = connection.execute(_LOOK).one()
        last = self._state
        if last is None:
            return _ClockReading(found.now_ns, here, here)
        if found.now_ns == last.held_ns:
            return last
        passed = self._database.elapsing_ns(connection) - found.wrote_ns
        elapsed = min(max(passed, 0), here - last.looked, _TRUSTED_NS)
        return _ClockReading(found.now_ns, here - elapsed, here)


class _ClockReading(NamedTuple):
    """The content of the database when it was last read, with our monotonic clock."""

    held_ns: int
    at: int  # when it had that content
    looked: int
