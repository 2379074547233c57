"""For authors of a plugin or a store: a scripted model server, and the promises that every plugin and store keeps.

The server needs nothing beyond the standard library.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_conformance.plugins.programs import AgentPrograms
    from lightning_conformance.plugins.server import ScriptedServer
    from lightning_conformance.plugins.suite import PluginConformance
    from lightning_conformance.stores.memory import MemoryStore
    from lightning_conformance.stores.suite import StoreConformance

if pytest := sys.modules.get("pytest"):  # a failing inherited test shows its values; the server works without pytest
    pytest.register_assert_rewrite(f"{__name__}.plugins", f"{__name__}.stores")

_HOMES = {
    "AgentPrograms": "plugins.programs",
    "MemoryStore": "stores.memory",
    "PluginConformance": "plugins.suite",
    "ScriptedServer": "plugins.server",
    "StoreConformance": "stores.suite",
}

__all__ = ["AgentPrograms", "MemoryStore", "PluginConformance", "ScriptedServer", "StoreConformance"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
