"""The time by which leases run, agreed on by all who share a database and untouched by clocks that are set."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from sqlalchemy import Connection, bindparam, select, text, update

from lightning_spans.store.sql.database import SQLITE, Database
from lightning_spans.store.sql.schema import lease_clock

_TRUSTED_NS: Final = 10 * 10**9  # the most that is believed of a clock that may have been set
_WRITTEN_EVERY_NS: Final = 50 * 10**6
_LOOK: Final = select(lease_clock.c.now_ns, lease_clock.c.wrote_ns)
_NO_WAIT_FOR_DISK: Final = text("SET LOCAL synchronous_commit = off")  # lost in a crash, leases only last longer
_WRITE: Final = update(lease_clock).values(now_ns=bindparam("now"), wrote_ns=bindparam("reading"))


class LeaseClock:
    """Counts the nanoseconds during which somebody used the store, from the time when the store was made.

    The database holds the count. Whoever used it last adds what passed on its own monotonic clock; that needs no trust
    in clocks at all. Where another process wrote last, what passed since is the difference of two readings of a clock
    that both can read (on PostgreSQL the server's, on SQLite the machine's monotonic one), but never more than passed
    here since the count was last looked at, nor more than ten seconds. So a clock that is set an hour ahead or back
    ends no lease early by more than that, machines need not agree on the time, and a lease outlives the time in which
    nobody used the store: after a restart, runners have what was left of their leases to report.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._state: _Seen | None = None
        self._written = -_WRITTEN_EVERY_NS

    def now(self, connection: Connection) -> int:
        """Return the time without writing it down."""
        here = time.monotonic_ns()
        seen = self._look(connection, here)
        return seen.held_ns + here - seen.at

    def tick(self, connection: Connection) -> int:
        """Return the time and write it down, for the others.

        Args:
            connection: inside the one write transaction of this process. On PostgreSQL the time is written in a
                transaction of its own: one that holds the row until the work is done would make all others wait.
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
        self._state = _Seen(now, here, here)
        self._written = here
        return now

    def _look(self, connection: Connection, here: int) -> _Seen:
        """Read the count. Whoever reads without writing leaves our state as it is: threads may do so."""
        found = connection.execute(_LOOK).one()
        last = self._state
        if last is None:
            return _Seen(found.now_ns, here, here)
        if found.now_ns == last.held_ns:
            return last
        passed = self._database.elapsing_ns(connection) - found.wrote_ns
        elapsed = min(max(passed, 0), here - last.looked, _TRUSTED_NS)
        return _Seen(found.now_ns, here - elapsed, here)


class _Seen(NamedTuple):
    """What the database held when it was last looked at, by our monotonic clock."""

    held_ns: int
    at: int  # when it held that
    looked: int
