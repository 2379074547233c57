"""The replays that run on this server, by their attempts."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema import spans
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.calls import Call
from lightning_spans.schema.replays import COUPLED, ENDED, REPLAYED, Replay
from lightning_spans.store import Store
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.replay.record import Record, read_record
from lightning_trainer.gateway.replay.session import ReplaySession

_REMEMBERED: Final = 20_000  # ended replays whose first difference is kept
_RECORDS: Final = 64  # kept in memory, so that the forks of one attempt read it once


class Sessions:
    """Creates the session of each replay at its first request, and drops it at its end.

    Args:
        store: has the records.
        run_seed: returns the run's current seed.
    """

    def __init__(self, store: Store, run_seed: Callable[[], int | None]) -> None:
        self._store = store
        self._run_seed = run_seed
        self._expected: dict[str, Replay] = {}
        self._open: dict[str, ReplaySession] = {}
        self._opening: dict[str, asyncio.Task[ReplaySession]] = {}
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._parted: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def started(self, records: Iterable[AttemptRecord]) -> None:
        """Note attempts that have just begun."""
        for record in records:
            if record.rollout.replay is not None:
                self._expected[record.attempt_id] = record.rollout.replay

    async def of(self, attempt_id: str) -> ReplaySession:
        """Return the session of an attempt.

        Raises:
            Refusal: its record does not exist.
        """
        session = self._open.get(attempt_id)
        if session is not None:
            return session
        task = self._opening.get(attempt_id)
        if task is None:
            task = self._opening[attempt_id] = asyncio.ensure_future(asyncio.to_thread(self._make, attempt_id))
            task.add_done_callback(lambda _: self._opening.pop(attempt_id, None))
        session = await asyncio.shield(task)
        return self._open.setdefault(attempt_id, session)

    def _make(self, attempt_id: str) -> ReplaySession:
        replay = self._expected.get(attempt_id)
        if replay is None:  # another server issued the attempt, or this one was restarted
            found = self._store.attempts(attempt_ids=[attempt_id])
            replay = found[0].rollout.replay if found else None
        if replay is None:
            raise Refusal(409, f"attempt {attempt_id} replays nothing", "conflict_error")
        try:
            return ReplaySession(replay, self._record(replay.attempt_id), self._run_seed())
        except ConfigError as error:
            session = ReplaySession(replay, Record(replay.attempt_id, "", (), ()), None)
            session.ended = str(error)
            return session

    def _record(self, attempt_id: str) -> Record:
        with self._lock:
            known = self._records.get(attempt_id)
            if known is not None:
                self._records.move_to_end(attempt_id)
                return known
        record = read_record(self._store, attempt_id)
        with self._lock:
            self._records[attempt_id] = record
            while len(self._records) > _RECORDS:
                self._records.popitem(last=False)
        return record

    def at_end(self, attempt_id: str) -> str | None:
        """Return why an attempt that has just ended was no replay; None if it was one, or was not meant to be."""
        if attempt_id not in self._expected:
            return None
        session = self._open.get(attempt_id)
        return "the program ended without a model call or a tool call" if session is None else session.at_end()

    def parted(self, attempt_id: str) -> str | None:
        """Return where a replay that continued to its end first differed from its record; None: nowhere."""
        return self._parted.get(attempt_id)

    def forget(self, attempt_id: str) -> None:
        """Drop the session of an attempt that has ended."""
        self._expected.pop(attempt_id, None)
        session = self._open.pop(attempt_id, None)
        if session is not None and session.parted is not None:
            self._parted[attempt_id] = session.parted
            while len(self._parted) > _REMEMBERED:
                self._parted.popitem(last=False)


def summary(store: Store, attempt_id: str) -> Mapping[str, Any]:
    """Count what was answered from the record in a replay, read from the store.

    Returns:
        ``replayed``: model calls answered up to the fork; ``coupled``: after it; ``sampled``: sampled; ``own``: left to
        the program's own endpoint; ``tools_given`` and ``tools_run``; ``ended``: why the replay ended early, or None.

    Raises:
        Refusal: there is no such attempt, or it is no replay.
    """
    found = store.attempts(attempt_ids=[attempt_id])
    if not found or found[0].rollout.replay is None:
        raise Refusal(404, f"there is no replay {attempt_id}", code="not_found")
    calls = store.calls(attempt_ids=[attempt_id])
    its = store.spans(attempt_ids=[attempt_id])
    tools = [span for span in its if span.operation == spans.EXECUTE_TOOL]
    own = [span for span in its if span.operation == spans.CHAT and span.attributes.get(spans.FRAMEWORK) == "openai"]
    given = sum(span.attributes.get(spans.REPLAYED) is True for span in tools)
    coupled = sum(call.sampling.get(COUPLED) is True for call in calls)
    replayed = sum(REPLAYED in call.sampling for call in calls)
    return {
        "replayed": replayed - coupled,
        "coupled": coupled,
        "sampled": sum(REPLAYED not in call.sampling and call.error is None for call in calls),
        "own": sum(spans.REROUTED not in span.attributes for span in own),
        "tools_given": given,
        "tools_run": len(tools) - given,
        "ended": why_ended(found[0], calls),
    }


def why_ended(attempt: AttemptRecord, calls: Iterable[Call] = ()) -> str | None:
    """Return why a replay ended early, from its error or that of one of its calls; None if it did not.

    Args:
        attempt: the replay.
        calls: the calls of the replay.
    """
    for error in (attempt.error, *(call.error for call in calls)):
        if error is not None and ENDED in error:
            return error.partition(ENDED)[2].partition("\n")[0]
    return None
