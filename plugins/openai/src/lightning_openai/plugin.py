"""The plugin's hook: what `lightning_spans.attach("openai")` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spans import hookimpl

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@hookimpl
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Record the openai client."""
    if framework != "openai":
        return None
    from lightning_openai.patch import bind

    return bind(recorder)
