"""Attributes of frameworks, replaced and put back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

logger = logging.getLogger("lightning_spans")


def replace(owner: type | ModuleType, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute that a class or module itself has.

    Args:
        owner: a class or a module.
        name: the attribute; a static or class method stays one.
        wrap: gets the function, gives the one that takes its place and calls it, or the same to leave it alone. It must
            be inert after the undo: somebody who patched later may still call it.

    Returns:
        The undo. It puts the original back, unless somebody patched after us: that would undo his patch.

    Raises:
        AttributeError: the owner has no such attribute of its own.
    """
    try:
        original = vars(owner)[name]
    except KeyError:
        raise AttributeError(f"{owner.__name__} has no {name} of its own to patch") from None
    bound = isinstance(original, (classmethod, staticmethod))
    function = original.__func__ if bound else original
    wrapper = wrap(function)
    if wrapper is function:  # it wants none
        return lambda: None
    functools.update_wrapper(wrapper, function)
    put = type(original)(wrapper) if bound else wrapper
    setattr(owner, name, put)

    def undo() -> None:
        if vars(owner).get(name) is put:
            setattr(owner, name, original)

    return undo


class Undo:
    """What is to be undone, last first; calling it twice undoes once."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Keep a step."""
        self._steps.append(step)

    def __call__(self) -> None:
        """Undo; a step that fails is logged, and keeps no other from being undone."""
        while self._steps:
            step = self._steps.pop()
            try:
                step()
            except Exception:
                logger.exception("lightning: %r failed, and something may not be restored", step)


def replace_in_subclasses(base: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a method in every subclass that has its own, in those that are there and in those still to come.

    Args:
        base: an abstract class; its own method is replaced too, if it has one.
        name: the method.
        wrap: as of `replace`. One call may pass several wrappers, where a method calls its parent's.

    Returns:
        The undo.
    """
    undo = Undo()

    def take(kind: Any) -> None:
        if name in vars(kind):
            undo.add(replace(kind, name, wrap))

    def take_all(kind: Any, seen: set[Any]) -> None:
        if kind not in seen:
            seen.add(kind)
            take(kind)
            for below in type.__subclasses__(kind):
                take_all(below, seen)

    def init_subclass(cls: Any, **options: Any) -> None:
        super(base, cls).__init_subclass__(**options)
        take(cls)

    def call_first(original: Any) -> Any:
        def both(cls: Any, **options: Any) -> None:
            original(cls, **options)
            take(cls)

        return both

    if "__init_subclass__" in vars(base):
        undo.add(replace(base, "__init_subclass__", call_first))
    else:
        base.__init_subclass__ = classmethod(cast("Any", init_subclass))
        undo.add(lambda: delattr(base, "__init_subclass__"))
    take_all(base, set())
    return undo
