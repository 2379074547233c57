"""Modules are the agents: their spans, and their names for the model calls that they make.

A module's name is that of the attribute under which the module that calls it holds it, as DSPy's optimizers name
predictors. One that nobody holds has the name of its signature's class, or else of its own. What DSPy's own modules are
made of (the predictor in a `ChainOfThought`, those in a `ReAct`) works in the name of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import dspy

from lightning_dspy import FRAMEWORK
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

_UNNAMED: Final = frozenset({"StringSignature", "Signature", "NewSignature"})  # what DSPy calls signatures in strings


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every module, until what is yielded is called."""
    modules = DspyModules(recorder, FRAMEWORK)
    yield modules.stop
    yield replace(dspy.Module, "__call__", modules.wrap_call)
    yield replace(dspy.Module, "acall", modules.wrap_acall)


class DspyModules(Tracker):
    """Begins and ends our spans with the calls of modules."""

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A module is called."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name(module)
            if name is None:
                return original(module, *args, **kwargs)
            with self.inside(self.begin_agent(name, by_default=is_dspys(module) and name == type(module).__name__)):
                return original(module, *args, **kwargs)

        return call

    def wrap_acall(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A module is called, and awaited."""

        async def acall(module: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name(module)
            if name is None:
                return await original(module, *args, **kwargs)
            with self.inside(self.begin_agent(name, by_default=is_dspys(module) and name == type(module).__name__)):
                return await original(module, *args, **kwargs)

        return acall

    def _name(self, module: Any) -> str | None:
        """Return the name of a module; None for a part of DSPy's own, and where nothing is recorded."""
        if not self.live:
            return None
        with self.guard():
            caller = calling_module()
            if caller is None:
                return own_name(module)
            if is_dspys(caller) and is_dspys(module):
                return None
            return held_as(caller, module) or own_name(module)
        return None


def calling_module() -> Any:
    """Return the module that is being called here; None outside of all."""
    callers = dspy.settings.caller_modules
    return callers[-1] if callers else None


def is_dspys(module: Any) -> bool:
    """Whether a module is of a class that DSPy brings."""
    return type(module).__module__.partition(".")[0] == "dspy"


def held_as(caller: Any, module: Any) -> str | None:
    """Return how a module names one that it holds, itself or in a list or dictionary; None where it holds none."""
    held: dict[str, Any] = vars(caller)
    for name, value in held.items():
        if value is module:
            return name
        if isinstance(value, list | tuple):
            for index, one in enumerate(value):
                if one is module:
                    return f"{name}[{index}]"
        elif isinstance(value, Mapping):
            for key, one in value.items():
                if one is module:
                    return f"{name}[{key!r}]"
    return None


def own_name(module: Any) -> str:
    """Return the name of a module that nobody holds."""
    if is_dspys(module):
        name = getattr(getattr(module, "signature", None), "__name__", None)
        if isinstance(name, str) and name not in _UNNAMED:
            return name
    return type(module).__name__
