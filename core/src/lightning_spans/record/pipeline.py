"""What is attached in this process: one recorder for all frameworks, and the stages that its spans pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_spans.record.delivery.deliver import Delivery
    from lightning_spans.record.recorder import SpanRecorder
    from lightning_spans.record.tracing.listeners import Listeners, Naming


@dataclass(slots=True)
class Pipeline:
    """Created by the first `attach()`, closed by the last `detach()`.

    Attributes:
        recorder: begins and ends spans.
        delivery: writes to the process's own store.
        listeners: tell plugins of ended spans.
        naming: asks plugins for names of agents.
        stop_carrying: stops carrying context and attempt into threads and processes.
    """

    recorder: SpanRecorder
    delivery: Delivery
    listeners: Listeners
    naming: Naming
    stop_carrying: Callable[[], None]

    def close(self, timeout_s: float) -> None:
        """Stop recording, and deliver or spool what is pending, within the time."""
        self.stop_carrying()
        self.recorder.tracer.close(timeout_s)
        self.naming.close()
        self.listeners.close()


_live: Pipeline | None = None  # process-wide, because patches of a framework are too


def live_pipeline() -> Pipeline | None:
    """Return the pipeline while something is attached, otherwise None."""
    return _live


def set_live(pipeline: Pipeline | None) -> None:
    """Set the process's pipeline; for `attach()` and `detach()`, under their lock."""
    global _live  # noqa: PLW0603 - see `_live`
    _live = pipeline


def live_recorder() -> SpanRecorder | None:
    """Return the recorder of this process while something is attached, otherwise None."""
    return None if _live is None else _live.recorder
