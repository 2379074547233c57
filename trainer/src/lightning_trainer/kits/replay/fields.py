"""The options of `lightning-rl fork` and `replay`. The flags are made of them, so this module imports little."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_spans.schema.replays import ToolPolicy
from lightning_trainer.options.measuring import SuccessOptions
from lightning_trainer.options.record import OptionRecord


class RecordFields(OptionRecord):
    """The record that is replayed, and the tools that are called again."""

    store: str
    """URL of the database with the record. What is replayed is recorded there too."""
    run_tools: tuple[str, ...] = ()
    """Tools that are always called, by name or glob."""


class ForkFields(RecordFields):
    """Which call of which attempt is sampled again, and how often."""

    rollout: str | None = None
    """Rollout to fork: its successful attempt, or its last one if none succeeded."""
    attempt: str | None = None
    """Attempt to fork, instead of --rollout."""
    call: int | None = None
    """Call to change, counted from 0, as in `traces`."""
    times: int = Field(default=1, ge=1)
    """Number of continuations."""
    say: str | None = None
    """Replace the answer of that call by this text."""
    tools: ToolPolicy = "replay"
    """Tool calls: return recorded results (replay), call every tool (run), or call none (refuse)."""
    refuse_tools: tuple[str, ...] = ()
    """Tools that are never called, by name or glob."""
    data: Path | None = None
    """Fail unless the recorded task is in this file."""
    dry_run: bool = False
    """Replay the whole record, and report where the program deviates from it."""


class ReplayFields(SuccessOptions, RecordFields):
    """Which records are replayed, and what counts as a success."""

    rollouts: tuple[str, ...] = ()
    """Ids of rollouts, attempts or traces. Default: all rollouts that succeeded."""
    file: Path | None = None
    """The same, one per line: an id, or an object with `rollout_id`, `attempt_id` or `trace_id` and, if it is not
    recorded, the `task`."""
    stop: bool = False
    """End a replay at its first difference."""
