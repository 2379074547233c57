"""Failures: the text with which DSPy reports a tool's failure to the model, and answers that DSPy cannot read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import dspy
from dspy.adapters.base import Adapter

from lightning_dspy import FRAMEWORK
from lightning_dspy.agents import is_dspys
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracebacks import without_our_frames
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

_AGENTS: Final = ("dspy.predict.react", "dspy.predict.react_v2")  # modules that report a tool's failure to the model
_OURS: Final = ("lightning_dspy", "lightning_openai")
_FORMATS: Final = ("format_error_for_lm", "_fmt_exc")  # the second before 3.4
_TOOL, _ARGUMENTS = "next_tool_name", "next_tool_args"  # the fields of a `ReAct`
_reading: Final[ContextVar[bool]] = ContextVar("lightning_dspy_reading", default=False)


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch how DSPy formats errors and reads answers; what is yielded removes each patch."""
    answers = ToldModels(recorder, FRAMEWORK)
    yield answers.stop
    yield replace_in_subclasses(Adapter, "parse", answers.wrap_parse)
    for name in _AGENTS:
        try:
            module = import_module(name)
        except ImportError:  # the second is new in 3.4
            continue
        for known in _FORMATS:
            if known in vars(module):
                yield replace(module, known, answers.wrap_format)


def agent_with_tools() -> Any:
    """Return DSPy's agent with tools whose predictor is called here; None if there is none."""
    callers = dspy.settings.caller_modules or []
    holder = callers[-2] if len(callers) > 1 and is_dspys(callers[-1]) else None
    return holder if is_dspys(holder) and isinstance(getattr(holder, "tools", None), dict) else None


class ToldModels(Tracker):
    """Records tool calls written as text that DSPy rejects: it silently asks the model again."""

    def wrap_format(self, original: Callable[..., str]) -> Callable[..., str]:
        """Wrap the formatting of an error for a model, with the topmost stack frames."""

        def told(error: BaseException, *args: Any, **kwargs: Any) -> str:
            with self.guard():
                without_our_frames(error, *_OURS)
            return original(error, *args, **kwargs)

        return told

    def wrap_parse(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an adapter's reading of an answer. One adapter may delegate to another."""

        def parse(adapter: Any, signature: Any, completion: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.live or _reading.get():
                return original(adapter, signature, completion, *args, **kwargs)
            token = _reading.set(True)
            try:
                return original(adapter, signature, completion, *args, **kwargs)
            except Exception as error:
                with self.guard():
                    self._refuse(signature, str(completion), error)
                raise
            finally:
                _reading.reset(token)

        return parse

    def _refuse(self, signature: Any, completion: str, error: Exception) -> None:
        agent = agent_with_tools() if _TOOL in signature.output_fields else None
        name = _field(completion, _TOOL)
        if agent is None or name is None or name == "finish":
            return
        why = str(error) if name in agent.tools else f"there is no tool {name!r}"
        self.end(self.begin_tool(name, None, _field(completion, _ARGUMENTS) or "{}"), error=why)


def _field(completion: str, name: str) -> str | None:
    """Return a field of an unreadable answer in the format of `ChatAdapter`, `XMLAdapter` or JSON."""
    for form in (r"\[\[ ## {} ## \]\]\s*(.*?)\s*(?=\[\[ ## |\Z)", r"<{0}>\s*(.*?)\s*</{0}>"):
        if found := re.search(form.format(name), completion, re.DOTALL):
            return found[1]
    if found := re.search(rf'"{name}"\s*:\s*', completion):
        try:
            value, _ = json.JSONDecoder().raw_decode(completion, found.end())
        except ValueError:
            return completion[found.end() :]
        return value if isinstance(value, str) else json.dumps(value)
    return None
