"""The plugin's hook: what `lightning_spans.attach("autogen")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Bind AutoGen's agents, teams, tools and models, and the wire that makes the chat spans, to the recorder."""
    if framework != "autogen":
        return None
    from lightning_autogen import agents, models, tools
    from lightning_openai import wire
    from lightning_spans.patches import Undo

    undo = Undo()
    for bind in (wire.bind, models.bind, tools.bind, agents.bind):
        undo.add(bind(recorder))
    return undo
