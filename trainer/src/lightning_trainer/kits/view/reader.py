"""A store as the viewer reads it, and values that change whenever something in it changes."""

from __future__ import annotations

from typing import Final

from sqlalchemy import func, select

from lightning_spans.store.sql import schema
from lightning_spans.store.sql.reader import SqlReader
from lightning_trainer.kits.view.mark_table import marks_version

_COUNT_UP: Final = (
    *(each.c.seq for each in (schema.spans, schema.calls, schema.rewards, schema.rollouts, schema.deployments)),
    schema.attempts.c.fence,
)


class StoreReader(SqlReader):
    """The viewer's store."""

    def state_mark(self) -> tuple[int, ...]:
        """Return a value that changes with each record, mark, and start or end of an attempt. Only indexes are read."""
        newest = [select(func.max(column)).scalar_subquery() for column in _COUNT_UP]
        states = [(schema.rollouts, schema.QUEUED), (schema.attempts, schema.RUNNING)]
        counts = [select(func.count()).select_from(table).where(state).scalar_subquery() for table, state in states]
        with self.reading() as connection:
            found = connection.execute(select(*newest, *counts)).one()
            return (*(number or 0 for number in found), *marks_version(connection))

    def at_work(self) -> bool:
        """Whether an attempt is running with a valid lease, by the store's own clock."""
        attempts, clock = schema.attempts.c, schema.lease_clock.c
        with self.reading() as connection:
            now_ns, wrote_ns = connection.execute(select(clock.now_ns, clock.wrote_ns)).one()
            passed = self.elapsing_ns(connection) - wrote_ns
            if passed < 0:  # the machine was restarted since
                return False
            leased = attempts.lease_until_ns > now_ns + passed
            return connection.scalar(select(attempts.fence).where(schema.RUNNING, leased).limit(1)) is not None
