"""The plugin's hook: what `lightning_spans.attach("langchain")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.recorder import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Bind LangChain's callbacks, and the wire that makes the chat spans, to the recorder."""
    if framework != "langchain":
        return None
    from lightning_langchain.handler import bind
    from lightning_openai import wire
    from lightning_spans.patches import Undo

    undo = Undo()
    undo.add(wire.bind(recorder))
    undo.add(bind(recorder))
    return undo
