"""Attributes of frameworks, replaced and put back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

logger = logging.getLogger("lightning_spans")
# What each wrapper stands in for, and whose it was.
_ours: Final[WeakKeyDictionary[Any, tuple[Any, Any]]] = WeakKeyDictionary()


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
    _ours[wrapper] = (owner, function)
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

    def __bool__(self) -> bool:
        """Whether there is something to undo."""
        return bool(self._steps)

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
    for kind in list(_with_subclasses(base)):
        take(kind)
    return undo


def _with_subclasses(base: Any) -> Iterator[Any]:
    waiting, seen = [base], set()
    while waiting:
        kind = waiting.pop(0)
        if kind not in seen:
            seen.add(kind)
            yield kind
            waiting += type.__subclasses__(kind)


# Somebody else may patch the same method. He keeps what he found, which may be a wrapper of ours that is undone by the
# time he puts it back; or he puts back what was there before us.


def put_back(base: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Replace a method again in every subclass where somebody took our wrapper out; empty where nobody did.

    Args:
        base: as of `replace_in_subclasses`.
        name: the method.
        wrap: as of `replace`.

    Returns:
        The undo.
    """
    undo = Undo()
    for kind in _with_subclasses(base):
        if name in vars(kind) and not any(map(_is_ours, _layers(vars(kind)[name]))):
            undo.add(replace(kind, name, wrap))
    return undo


def clear(base: Any, name: str) -> None:
    """Take wrappers of ours that are undone out of every subclass, also from under the wrappers of others.

    A function that holds one in a closure keeps it; such a wrapper must be inert.
    """
    for kind in _with_subclasses(base):
        if name not in vars(kind):
            continue
        found = vars(kind)[name]
        if not _is_ours(found):
            for layer in _layers(found):
                _free(layer)
        elif _ours[found][0] is kind:
            setattr(kind, name, _original(found))
        else:  # it was its parent's when somebody found it
            delattr(kind, name)


def _is_ours(found: Any) -> bool:
    return type(found) is FunctionType and found in _ours  # a proxy over one says that it is equal


def _layers(found: Any) -> Iterator[Any]:
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


def _original(found: Any) -> Any:
    while _is_ours(found):
        found = _ours[found][1]
    return found


def _free(layer: Any) -> None:
    """Return a proxy (wrapt's) what our wrapper under it stands in for; of a function, `__wrapped__` is but a note."""
    if type(layer) is not FunctionType and _is_ours(getattr(layer, "__wrapped__", None)):
        layer.__wrapped__ = _original(layer.__wrapped__)
