"""Checks after the first task whether anything of the agent is captured, instead of after the first batch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.spans import CHAT
from lightning_spans.store import Store

LOOK_S: Final = 1.0


class FirstTask:
    """Called during a run's first batch: once all rollouts of some task have ended, checks what they recorded.

    Args:
        store: contains spans and calls.
        rollouts: of the batch.
        refuse: returns what to raise if so many rollouts recorded no model call.
    """

    def __init__(self, store: Store, rollouts: Sequence[Rollout], refuse: Callable[[int], Exception]) -> None:
        self._store = store
        self._refuse = refuse
        self._groups: defaultdict[str, list[str]] = defaultdict(list)
        for rollout in rollouts:
            self._groups[rollout.group_id].append(rollout.rollout_id)
        self._due_s = 0.0
        self._seen = False

    def __call__(self) -> None:
        """Check, about once a second, until the first task has ended.

        Raises:
            Exception: `refuse`'s, if rollouts of that task succeeded and nothing was captured from any.
        """
        if self._seen or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_S
        rollouts = self._store.rollouts(rollout_ids=[i for ids in self._groups.values() for i in ids])
        status = {rollout.rollout_id: rollout.status for rollout in rollouts}
        for ids in self._groups.values():
            ended = [status.get(i, "queued") for i in ids]
            if "succeeded" in ended and not {"queued", "running"} & set(ended):
                self._seen = True
                if not self._has_calls(ids):
                    raise self._refuse(len(ids))
                return

    def _has_calls(self, ids: Sequence[str]) -> bool:
        if self._store.calls(rollout_ids=ids):
            return True
        return any(span.operation == CHAT for span in self._store.spans(rollout_ids=ids))
