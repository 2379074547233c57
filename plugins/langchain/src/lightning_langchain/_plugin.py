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

    undo_callbacks = bind(recorder)
    undo_wire = wire.bind(recorder)

    def undo() -> None:
        undo_callbacks()
        undo_wire()

    return undo
