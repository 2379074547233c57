"""Groups of rollouts in progress: queued per prompt, watched together, passed on as each ends. Without verl."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from lightning_spans.errors import LightningError, RewardError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.states import AttemptState, RolloutState
from lightning_trainer.choices import Timeouts
from lightning_trainer.rl.rollouts import REWARD_ERROR, SLACK_S, Outcome, StalledError, outcomes

logger = logging.getLogger(__name__)
POLL_S: Final = 0.1
_POLL_EACH_S: Final = 0.001  # for each rollout, because reading their states takes server time
_RUNNING: Final = frozenset({"queued", "running"})

OnEnd = Callable[[list[Outcome]], None]
Judging = Callable[[list[Outcome]], list[Outcome]]


class Groups:
    """Watches groups in a separate thread.

    Args:
        store: where rollouts are queued.
        poll_s: seconds between polls.
        judging: gives outcomes rewards before they are passed on, in other threads; None: they already have rewards.
        at_once: groups that are judged at once.
        timeouts: how rollouts that were too slow count.
    """

    def __init__(
        self,
        store: Store,
        *,
        poll_s: float = POLL_S,
        judging: Judging | None = None,
        at_once: int = 1,
        timeouts: Timeouts = "count",
    ) -> None:
        self._store = store
        self._timeouts = timeouts
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Sequence[Rollout], OnEnd]] = {}
        self._judging = judging
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="lightning-judging")
        self._judged: list[tuple[Future[list[Outcome]], OnEnd]] = []
        self._failure: BaseException | None = None
        self._came = threading.Event()
        threading.Thread(target=self._run, name="lightning-groups", daemon=True).start()

    def add(self, rollouts: Sequence[Rollout], on_end: OnEnd) -> None:
        """Queue one group; `on_end` gets its outcomes, in the order of `rollouts`, on the watching thread.

        Raises:
            LightningError: watching has failed.
        """
        self.check()
        self._store.enqueue(rollouts)
        with self._lock:
            self._pending[rollouts[0].group_id] = (rollouts, on_end)
        self._came.set()

    def check(self) -> None:
        """Check that groups are still watched.

        Raises:
            LightningError: why they are not.
        """
        if isinstance(self._failure, LightningError):
            raise self._failure
        if self._failure is not None:
            raise LightningError(f"collecting rollouts failed: {type(self._failure).__name__}: {self._failure}")

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            logger.exception("collecting rollouts failed")
            self._failure = error

    def _watch(self) -> None:
        seen: object = None
        since = time.monotonic()
        while True:
            self._hand_on()
            with self._lock:
                pending = dict(self._pending)
            if not pending:
                self._came.wait(self._poll_s if self._judged else None)
                self._came.clear()
                seen, since = None, time.monotonic()
                continue
            ids = [rollout.rollout_id for rollouts, _ in pending.values() for rollout in rollouts]
            where = Where(rollout_ids=ids)
            status = {rollout.rollout_id: rollout.status for rollout in whole_list(self._store, RolloutState, where)}
            for group_id, (rollouts, on_end) in pending.items():
                if not any(status[rollout.rollout_id] in _RUNNING for rollout in rollouts):
                    self._end(group_id, rollouts, on_end)
            attempts = whole_list(self._store, AttemptState, where)
            moved = (Counter(status.values()), Counter(attempt.status for attempt in attempts))
            if moved != seen:
                seen, since = moved, time.monotonic()
            self._refuse_stall([r for rollouts, _ in pending.values() for r in rollouts], since)
            time.sleep(max(self._poll_s, len(ids) * _POLL_EACH_S))

    def _end(self, group_id: str, rollouts: Sequence[Rollout], on_end: OnEnd) -> None:
        ended = outcomes(self._store, rollouts, self._timeouts)
        for attempt in (attempt for outcome in ended for attempt in outcome.attempts):
            if attempt.status == "failed" and (attempt.error or "").startswith(REWARD_ERROR):
                raise RewardError(
                    f"{(attempt.error or '').removeprefix(REWARD_ERROR)}\n"
                    f"The task was {str(dict(attempt.rollout.task))[:300]}."
                )
        if self._judging is None:
            on_end(ended)
        else:
            self._judged.append((self._threads.submit(self._judging, ended), on_end))
        with self._lock:
            del self._pending[group_id]

    def _hand_on(self) -> None:
        """Pass on the groups that were judged since the last poll."""
        done = [each for each in self._judged if each[0].done()]
        self._judged = [each for each in self._judged if each not in done]
        for future, on_end in done:
            on_end(future.result())

    @staticmethod
    def _refuse_stall(rollouts: Sequence[Rollout], since: float) -> None:
        """Stop waiting if no rollout has started or ended for longer than any attempt may take."""
        if any(rollout.timeout_s is None for rollout in rollouts):
            return
        limit_s = max(rollout.timeout_s or 0.0 for rollout in rollouts) + SLACK_S
        if time.monotonic() - since > limit_s:
            raise StalledError(
                f"none of {len(rollouts)} rollouts has started or ended for {limit_s:.0f} s, "
                "longer than an attempt may take. Is a runner running? Look into the workers' logs: is the agent"
                " waiting for something that"
                " never comes?"
            )
