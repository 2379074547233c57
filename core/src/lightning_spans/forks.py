"""What is put right in a forked child: no thread lives on there but the one that forked, and locks stay held."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

_methods: WeakKeyDictionary[object, Callable[[Any], Any]] = WeakKeyDictionary()  # in the order in which they came


def in_child(function: Callable[[], Any]) -> None:
    """Call this in each forked child; of an object, one method, as long as it lives: it is not kept alive for it."""
    if not hasattr(os, "register_at_fork"):
        return
    if isinstance(function, MethodType):
        _methods[function.__self__] = function.__func__
    else:
        os.register_at_fork(after_in_child=function)


def _call_methods() -> None:
    for owner, method in list(_methods.items()):
        method(owner)


in_child(_call_methods)
