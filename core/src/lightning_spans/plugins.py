"""The plugin manager: loads plugins by name when they are needed, and keeps one claim to each name."""

from __future__ import annotations

import functools
import logging
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
from pluggy import PluginManager

from lightning_spans import hookspecs
from lightning_spans.errors import AttachError, ConfigError
from lightning_spans.hookspecs import PROJECT

logger = logging.getLogger("lightning_spans")
_lock = threading.RLock()


@functools.cache
def manager() -> PluginManager:
    """Give the process's plugin manager, with the core's own plugins registered."""
    from lightning_spans import adapter, credit

    plugin_manager = PluginManager(PROJECT)
    plugin_manager.add_hookspecs(hookspecs)
    plugin_manager.register(adapter, "core-adapter")
    plugin_manager.register(credit, "core-credit")
    return plugin_manager


def installed() -> dict[str, EntryPoint]:
    """Give the installed plugins by name, none of them imported."""
    return {entry.name: entry for entry in entry_points(group=PROJECT)}


def load(name: str) -> None:
    """Import and register one plugin, once.

    Raises:
        AttachError: it is not installed, does not import, or has a hook that does not exist.
    """
    with _lock:
        if manager().has_plugin(name):
            return
        entry = installed().get(name)
        if entry is None:
            known = ", ".join(sorted(installed())) or "none"
            raise AttachError(f"no plugin {name!r}: is lightning-{name} installed? Plugins installed: {known}.")
        try:
            module = entry.load()
        except ImportError as error:
            raise AttachError(f"plugin {name!r} does not import: {error}. Is {name} itself installed?") from error
        register(module, name)


def register(plugin: object, name: str) -> None:
    """Register a plugin object under a name, and check that every hook it has exists.

    Raises:
        AttachError: the name is taken, or a hook is misspelt.
    """
    with _lock:
        try:
            manager().register(plugin, name)
            manager().check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:
            if manager().get_plugin(name) is plugin:
                manager().unregister(plugin)
            raise AttachError(f"plugin {name!r}: {error}") from error


def unregister(name: str) -> None:
    """Forget a plugin; one that is not there is no error."""
    with _lock:
        plugin = manager().get_plugin(name)
        if plugin is not None:
            manager().unregister(plugin)


def load_all() -> list[str]:
    """Import and register every installed plugin, as the training side does; one that fails is logged and left out.

    Returns:
        The names of the plugins that could not be loaded.
    """
    failed = []
    for name in installed():
        try:
            load(name)
        except AttachError:
            logger.exception("lightning: plugin %s is left out", name)
            failed.append(name)
    return failed


def listens(hook: str) -> str:
    """Name the plugins that implement a hook, in words; empty when none does."""
    implementations = getattr(manager().hook, hook).get_hookimpls()
    return ", ".join(known.plugin_name for known in implementations) if implementations else ""


def notify(hook: str, **arguments: Any) -> list[Any]:
    """Call every implementation of a hook, each guarded on its own, and give the answers that are not None.

    One listener that raises starves no other (plain pluggy calls stop at the first).
    """
    caller = getattr(manager().hook, hook)
    answers = []
    for implementation in reversed(caller.get_hookimpls()):
        given = {name: arguments[name] for name in implementation.argnames}
        try:
            answer = implementation.function(**given)
        except Exception:
            logger.exception("lightning: %s of plugin %s failed", hook, implementation.plugin_name)
        else:
            if answer is not None:
                answers.append(answer)
    return answers


def registry(hook: str) -> dict[str, Any]:
    """Collect what plugins register by name through a ``lightning_register_...`` hook.

    Raises:
        ConfigError: two plugins claim one name; the message names both.
    """
    found: dict[str, tuple[str, Any]] = {}
    for implementation in getattr(manager().hook, hook).get_hookimpls():
        owner = implementation.plugin_name

        def claim(name: str, thing: Any, owner: str = owner) -> None:
            if name in found:
                raise ConfigError(f"{name!r} is registered by two plugins: {found[name][0]} and {owner}.")
            found[name] = (owner, thing)

        implementation.function(register=claim)
    return {name: thing for name, (_, thing) in found.items()}
