"""Replaces attributes of frameworks, and puts them back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, ref

logger = logging.getLogger("lightning_spans")
# The owner of each wrapper. What it replaces is its own attribute: that may refer to the owner, which refers to the
# wrapper, so from here it would stay in memory forever.
_ours: Final[WeakKeyDictionary[Any, ref[Any]]] = WeakKeyDictionary()
_REPLACED: Final = "_lightning_replaced"


def replace(owner: type | ModuleType, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute that a class or module itself has.

    Args:
        owner: a class or a module.
        name: the attribute; a static or class method stays one.
        wrap: takes the function and returns its replacement, or the function itself to leave it unchanged. The
            replacement must do nothing after the undo: another library that patched later may still call it.

    Returns:
        The undo. It restores the original, unless another library patched later: that would undo its patch. It does
        not keep the owner in memory.

    Raises:
        AttributeError: the owner itself has no such attribute.
    """
    try:
        original = vars(owner)[name]
    except KeyError:
        raise AttributeError(f"{owner.__name__} has no {name} of its own to patch") from None
    bound = isinstance(original, (classmethod, staticmethod))
    function = original.__func__ if bound else original
    wrapper = wrap(function)
    if wrapper is function:  # `wrap` leaves it unchanged
        return lambda: None
    functools.update_wrapper(wrapper, function)
    setattr(wrapper, _REPLACED, original)
    _ours[wrapper] = ref(owner)
    setattr(owner, name, type(original)(wrapper) if bound else wrapper)
    return functools.partial(_restore, ref(owner), name, ref(wrapper))


def _restore(of_owner: ref[Any], name: str, of_wrapper: ref[Any]) -> None:
    owner, wrapper = of_owner(), of_wrapper()
    if owner is None or wrapper is None:
        return
    found = vars(owner).get(name)
    if (found.__func__ if isinstance(found, (classmethod, staticmethod)) else found) is wrapper:
        setattr(owner, name, getattr(wrapper, _REPLACED))


class Undo:
    """Steps to undo, in reverse order. Calling it twice undoes once."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Add a step."""
        self._steps.append(step)

    def __bool__(self) -> bool:
        """Whether there is something to undo."""
        return bool(self._steps)

    def __call__(self) -> None:
        """Undo. A step that fails is logged, and the others still run."""
        while self._steps:
            step = self._steps.pop()
            try:
                step()
            except Exception:
                logger.exception("lightning: %r failed, and some changes may not be undone", step)


def replace_in_subclasses(base: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a method in every subclass that defines it, existing and future ones.

    Args:
        base: an abstract class; its own method is replaced too, if it has one.
        name: the method.
        wrap: see `replace`. One call may pass several wrappers, if a method calls its parent's.

    Returns:
        The undo.
    """
    undo = Undo()
    taken: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()

    def take(kind: Any) -> None:
        if name in vars(kind):
            taken[kind] = replace(kind, name, wrap)

    def restore() -> None:
        for one in list(taken.values()):
            one()

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
    undo.add(restore)
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


# Another library may patch the same method. It keeps what it found, which may be our wrapper, already undone when the
# library puts it back; or it puts back what was there before our patch.


def put_back(base: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Replace a method again in every subclass from which another library removed our wrapper; empty if none did.

    Args:
        base: see `replace_in_subclasses`.
        name: the method.
        wrap: see `replace`.

    Returns:
        The undo.
    """
    undo = Undo()
    for kind in _with_subclasses(base):
        if name in vars(kind) and not any(map(_is_ours, _layers(vars(kind)[name]))):
            undo.add(replace(kind, name, wrap))
    return undo


def clear(base: Any, name: str) -> None:
    """Remove our undone wrappers from every subclass, also from below other libraries' wrappers.

    A function that holds one in a closure keeps it, so such a wrapper must do nothing.
    """
    for kind in _with_subclasses(base):
        if name not in vars(kind):
            continue
        found = vars(kind)[name]
        if not _is_ours(found):
            for layer in _layers(found):
                _free(layer)
        elif _ours[found]() is kind:
            setattr(kind, name, _original(found))
        else:  # it was its parent's when another library found it
            delattr(kind, name)


def _is_ours(found: Any) -> bool:
    return type(found) is FunctionType and found in _ours  # a proxy around one compares as equal


def _layers(found: Any) -> Iterator[Any]:
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


def _original(found: Any) -> Any:
    while _is_ours(found):
        found = getattr(found, _REPLACED)
    return found


def _free(layer: Any) -> None:
    """Let a proxy (wrapt's) wrap what our wrapper below it replaces. A function's `__wrapped__` is only a note."""
    if type(layer) is not FunctionType and _is_ours(getattr(layer, "__wrapped__", None)):
        layer.__wrapped__ = _original(layer.__wrapped__)
