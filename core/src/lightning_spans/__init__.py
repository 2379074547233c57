"""Traces of agents, joined to exact tokens: the core of Lightning-RL.

Most public names are imported when they are used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_spans.adapter.adapt import adapt
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.hooks import hookimpl
    from lightning_spans.record.attach import Attachment, attach
    from lightning_spans.record.children import child_environment
    from lightning_spans.record.context import use_attempt
    from lightning_spans.record.program.agent import agent, workflow
    from lightning_spans.record.program.data_terms import data_terms
    from lightning_spans.record.program.emit import emit_reward
    from lightning_spans.record.program.tool import tool
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.rewards import Reward
    from lightning_spans.schema.spans import Span
    from lightning_spans.schema.transitions import Tokens, Transition, select
    from lightning_spans.store import Store, open_store
    from lightning_spans.store.traces import traces_of

_HOMES = {
    "Attachment": "record.attach",
    "Attempt": "schema.attempts",
    "Reward": "schema.rewards",
    "Span": "schema.spans",
    "Store": "store",
    "Tokens": "schema.transitions",
    "Trace": "adapter.trace",
    "Transition": "schema.transitions",
    "adapt": "adapter.adapt",
    "agent": "record.program.agent",
    "attach": "record.attach",
    "child_environment": "record.children",
    "data_terms": "record.program.data_terms",
    "emit_reward": "record.program.emit",
    "hookimpl": "hooks",
    "open_store": "store",
    "select": "schema.transitions",
    "tool": "record.program.tool",
    "traces_of": "store.traces",
    "use_attempt": "record.context",
    "workflow": "record.program.agent",
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
    "child_environment",
    "data_terms",
    "emit_reward",
    "hookimpl",
    "open_store",
    "select",
    "tool",
    "traces_of",
    "use_attempt",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
