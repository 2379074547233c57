"""The plugin's hook: what `lightning_spans.attach("openai-agents")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Bind the SDK's own spans, and the wire that makes the chat spans, to the recorder."""
    if framework != "openai-agents":
        return None
    from lightning_openai import wire
    from lightning_openai_agents.following import bind
    from lightning_spans.patches import Undo

    undo = Undo()
    undo.add(wire.bind(recorder))
    undo.add(bind(recorder))
    return undo
