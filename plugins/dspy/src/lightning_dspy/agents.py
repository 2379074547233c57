"""Agent spans: DSPy modules are the agents, and the spans record which one makes each model call.

A module is named after the attribute of the calling module that holds it, as in DSPy's optimizers. A module that is not
held is named after its signature's class, or after its own class. Parts of DSPy's own modules (the predictor within a
`ChainOfThought`, those within a `ReAct`) use the name of the whole.
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

# DSPy's name for signatures given as strings
_UNNAMED: Final = frozenset({"StringSignature", "Signature", "NewSignature"})


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch DSPy to record every module; what is yielded removes each patch."""
    modules = DspyModules(recorder, FRAMEWORK)
    yield modules.stop
    yield replace(dspy.Module, "__call__", modules.wrap_call)
    yield replace(dspy.Module, "acall", modules.wrap_acall)


class DspyModules(Tracker):
    """Starts and ends agent spans around calls of modules."""

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call of a module."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name(module)
            if name is None:
                return original(module, *args, **kwargs)
            with self.inside(self.begin_agent(name, by_default=is_dspys(module) and name == type(module).__name__)):
                return original(module, *args, **kwargs)

        return call

    def wrap_acall(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call of a module."""

        async def acall(module: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name(module)
            if name is None:
                return await original(module, *args, **kwargs)
            with self.inside(self.begin_agent(name, by_default=is_dspys(module) and name == type(module).__name__)):
                return await original(module, *args, **kwargs)

        return acall

    def _name(self, module: Any) -> str | None:
        """Return a module's name; None for parts of DSPy's own modules, and when nothing is recorded."""
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
    """Return the module that is currently running; None outside any module."""
    callers = dspy.settings.caller_modules
    return callers[-1] if callers else None


def is_dspys(module: Any) -> bool:
    """Whether a module's class belongs to DSPy."""
    return type(module).__module__.partition(".")[0] == "dspy"


def held_as(caller: Any, module: Any) -> str | None:
    """Return the name under which a module holds another, also in lists and dictionaries; None if it does not."""
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
    """Return the name of a module that no other module holds."""
    if is_dspys(module):
        name = getattr(getattr(module, "signature", None), "__name__", None)
        if isinstance(name, str) and name not in _UNNAMED:
            return name
    return type(module).__name__
