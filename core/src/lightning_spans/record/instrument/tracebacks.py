"""Removes our frames from exceptions, for frameworks that tell a model where its tool failed."""

from __future__ import annotations

from itertools import zip_longest
from types import TracebackType


def without_our_frames(error: BaseException, *packages: str) -> None:
    """Remove our wrappers' frames from the tracebacks of an exception and of its causes.

    Args:
        error: changed in place.
        packages: our import packages, in addition to the core's.
    """
    ours = {"lightning_spans", *packages}
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without(one.__traceback__, ours)
            waiting += [one.__cause__, one.__context__]


def _without(traceback: TracebackType | None, ours: set[str]) -> TracebackType | None:
    kept = []
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] not in ours:
            kept.append(traceback)
        traceback = traceback.tb_next
    for one, below in zip_longest(kept, kept[1:]):
        one.tb_next = below
    return kept[0] if kept else None
