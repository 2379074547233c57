"""The plugin's hook: what `lightning_spans.attach("semantic-kernel")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_semantic_kernel import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Semantic Kernel's agents, orchestrations and functions, in addition to the openai client's patches."""
    from lightning_openai import patch
    from lightning_semantic_kernel import agents, orchestrations, tools

    yield patch.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
    yield from orchestrations.bind(recorder)
