"""For those who write a plugin or a store: a scripted model server, and the promises that every plugin and store keeps.

`pip install "lightning-spans[testing]"`. The server needs nothing beyond the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_spans.testing.memory import MemoryStore
    from lightning_spans.testing.plugins import PluginConformance
    from lightning_spans.testing.server import ScriptedServer
    from lightning_spans.testing.stores import StoreConformance

_HOMES = {
    "MemoryStore": "memory",
    "PluginConformance": "plugins",
    "ScriptedServer": "server",
    "StoreConformance": "stores",
}

__all__ = ["MemoryStore", "PluginConformance", "ScriptedServer", "StoreConformance"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
