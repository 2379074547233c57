"""Marks: the users' notes about rollouts, calls and traces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRow:
    """A mark, with the task and the reward of its rollout.

    Attributes:
        rollout_id: of the marked rollout; "" for a trace that belongs to no rollout.
        trace_id: of such a trace; "" for a rollout.
        attempt_id: of the marked call; "" if it is unknown.
        span_id: of the marked call; "" for the whole rollout or trace.
        comment: text of the note.
        author: who marked it, under a name of their choice.
        marked_s: Unix time of its last change.
        task: of the rollout, shortened.
        reward: of the rollout.
    """

    rollout_id: str
    trace_id: str
    attempt_id: str
    span_id: str
    comment: str
    author: str
    marked_s: float
    task: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksPage:
    """The marks of a run, the newest first."""

    marks: list[MarkRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChange:
    """A mark to save, which replaces the one on the same rollout, call or trace; or a mark to remove."""

    run: str
    rollout_id: str = ""
    trace_id: str = ""
    attempt_id: str = ""
    span_id: str = ""
    comment: str = ""
    author: str = ""
    marked: bool = True
