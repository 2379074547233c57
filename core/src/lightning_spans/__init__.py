"""Traces of agents, joined to exact tokens: the core of Lightning.

Most public names are imported when they are used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once, because the module and the function share a name: a later import of the module would hide the function.
from lightning_spans.attach import Attachment, attach

if TYPE_CHECKING:
    from lightning_spans.adapter import adapt
    from lightning_spans.context import Attempt, use_attempt
    from lightning_spans.hookspecs import hookimpl
    from lightning_spans.recorder import agent
    from lightning_spans.rewards import Reward, emit_reward
    from lightning_spans.spans import Span
    from lightning_spans.store import Store, open_store
    from lightning_spans.trace import Trace, traces_of
    from lightning_spans.transitions import Tokens, Transition, select

_HOMES = {
    "Attempt": "context",
    "Reward": "rewards",
    "Span": "spans",
    "Store": "store",
    "Tokens": "transitions",
    "Trace": "trace",
    "Transition": "transitions",
    "adapt": "adapter",
    "agent": "recorder",
    "emit_reward": "rewards",
    "hookimpl": "hookspecs",
    "open_store": "store",
    "select": "transitions",
    "traces_of": "trace",
    "use_attempt": "context",
}

__all__ = [
    "Attachment",
    "Attempt",
    "Reward",
    "Span",
    "Store",
    "Tokens",
    "Trace",
    "Transition",
    "adapt",
    "agent",
    "attach",
    "emit_reward",
    "hookimpl",
    "open_store",
    "select",
    "traces_of",
    "use_attempt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
