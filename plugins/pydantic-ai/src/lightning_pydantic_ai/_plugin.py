"""The plugin's hook: what `lightning_spans.attach("pydantic-ai")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Bind Pydantic AI's agents, tools and models, and the wire that makes the chat spans, to the recorder."""
    if framework != "pydantic-ai":
        return None
    from lightning_openai import wire
    from lightning_pydantic_ai import at_work, models
    from lightning_spans.patches import Undo

    undo = Undo()
    for bind in (wire.bind, models.bind, at_work.bind):
        undo.add(bind(recorder))
    return undo
