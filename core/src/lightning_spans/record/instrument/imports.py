"""Patches that are applied when the program imports a module, so that a plugin never imports a library itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Final, TypeAlias

from wrapt import register_post_import_hook

from lightning_spans.record.instrument.patches import Undo
from lightning_spans.record.recorder import log_failure

Change: TypeAlias = Callable[[ModuleType], Callable[[], None]]
_waiting: Final[dict[str, list[Callable[[ModuleType], None]]]] = {}


def when_imported(name: str, change: Change) -> Undo:
    """Change a module, now if it is imported, otherwise when it is.

    Args:
        name: the module's full name.
        change: changes it, and returns what restores it. Its exceptions are logged.

    Returns:
        The undo; after it, a module imported later is not changed.
    """
    undo = Undo()

    def take(module: ModuleType) -> None:
        try:
            undo.add(change(module))
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(f"what changes {name}", error)

    if (module := sys.modules.get(name)) is not None:
        take(module)
        return undo
    if name not in _waiting:  # such a hook is never removed, so each module gets only one
        _waiting[name] = []
        register_post_import_hook(_announce_import, name)
    _waiting[name].append(take)
    undo.add(lambda: _forget(name, take))
    return undo


def _announce_import(module: ModuleType) -> None:
    for take in _waiting.get(module.__name__, ()):
        take(module)


def _forget(name: str, take: Callable[[ModuleType], None]) -> None:
    _waiting[name].remove(take)
