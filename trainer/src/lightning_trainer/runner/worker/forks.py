"""Forks in which the child never waits for an import that another attempt had begun.

Attempts share a worker, each in its own thread. If one forks, as `multiprocessing` does, the others' threads do not
exist in the child, but the locks of the modules that they were importing stay locked: the child would wait for ever as
soon as it imports one of them. So a fork waits until the imports of other threads have ended; the child then has
complete modules. If that takes too long, the child forgets what was half imported, and imports it again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

_WAIT_S: Final = 10.0  # most imports take less; an event loop that is blocked for longer is ended
_LOOK_S: Final = 0.005
_machinery: Any = import_module("importlib._bootstrap")  # Python offers no other access to its locks


def keep_imports_whole() -> None:
    """Protect every fork of this process from now on, until the process ends."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_wait_for_imports, after_in_child=_forget_half_imported)


def _wait_for_imports() -> None:
    # No lock is held on return: before the fork, another thread may begin an import. The child handles that.
    until = time.monotonic() + _WAIT_S
    while _imported_elsewhere() and not _imports_here() and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _imports_here() -> bool:
    """Whether this thread is importing a module while it forks: others may wait for that import."""
    me = threading.get_ident()
    return any(lock.owner == me for _, lock in _locks())


def _imported_elsewhere() -> list[str]:
    me = threading.get_ident()
    return [name for name, lock in _locks() if lock.owner not in (None, me)]


def _locks() -> Iterator[tuple[str, Any]]:
    """Yield the locks of modules that are being imported, with the module's name."""
    for name, reference in list(_machinery._module_locks.items()):
        lock = reference()
        if lock is not None and hasattr(lock, "owner"):
            yield name, lock


def _forget_half_imported() -> None:
    for name in _imported_elsewhere():
        _machinery._module_locks.pop(name, None)
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            for part in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[part]
