"""The plugin's hook: what `lightning_spans.attach("langchain")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_langchain import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record LangChain's callbacks, in addition to the openai client's own patches."""
    from lightning_langchain import handler
    from lightning_openai import patch

    yield patch.bind(recorder)
    yield from handler.bind(recorder)
