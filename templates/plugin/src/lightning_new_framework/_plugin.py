"""The plugin's hook: what `lightning_spans.attach("new-framework")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Bind NewFramework's agents and tools, and the wire that makes the chat spans, to the recorder."""
    if framework != "new-framework":
        return None
    from lightning_new_framework.at_work import bind
    from lightning_openai import wire
    from lightning_spans.patches import Undo

    undo = Undo()
    undo.add(wire.bind(recorder))
    undo.add(bind(recorder))
    return undo
