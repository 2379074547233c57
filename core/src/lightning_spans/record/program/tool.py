"""`tool()`: records a plain function as a tool; in a replay its recorded result is returned instead of calling it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from lightning_spans.errors import ConfigError
from lightning_spans.record import returned
from lightning_spans.record.context import current_agent, use_context
from lightning_spans.record.instrument.scope import place_of_call
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.record.replay import aoutcome_for, current_replay, keep_raised, outcome_for, tell_unreturned
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps

if TYPE_CHECKING:
    from lightning_spans.record.recorder import RecordingSpan
    from lightning_spans.schema.spans import Json

F = TypeVar("F", bound=Callable[..., Any])

_OWN: Final = ("self", "cls")  # the object of a method is left out, because its text may differ in another process


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, pure: bool = False, side_effects: bool = False) -> Callable[[F], F]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    pure: bool = False,
    side_effects: bool = False,
) -> Any:
    """Record a function or coroutine function as a tool: as a decorator, or as ``tool(random.random)``.

    While attached, each call is an ``execute_tool`` span with arguments and result. In a replay, the recorded result is
    returned or raised, and the function is not called. So it also serves for what differs between runs: a clock, a
    random number, a request. A result that is neither JSON-like nor a dataclass, a pydantic model, a time, an array or
    a tuple or set of these is not recorded, and ends a replay.

    Args:
        function: the function.
        name: of the tool; by default the function's.
        pure: it depends only on its arguments and changes nothing: a replay may call it.
        side_effects: it must not be called after a fork either: there it ends the replay.

    Raises:
        ConfigError: both `pure` and `side_effects` are given, or it is a generator function.
    """
    if pure and side_effects:
        raise ConfigError("tool(pure=True, side_effects=True): choose one of them.")
    if function is None:
        return functools.partial(_tool, name=name, pure=pure, side_effects=side_effects)
    return _tool(function, name=name, pure=pure, side_effects=side_effects)


def _tool(function: Callable[..., Any], *, name: str | None, pure: bool, side_effects: bool) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"tool({_name(function)}): it is a generator function. Return a list instead.")
    marks = {"pure": pure, "side_effects": side_effects}
    call = _Call(function, name or _name(function), {mark: True for mark, given in marks.items() if given})

    if inspect.iscoroutinefunction(function):

        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await call.arun(args, kwargs)

        return functools.update_wrapper(async_wrapper, function)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call.run(args, kwargs)

    return functools.update_wrapper(wrapper, function)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class _Call:
    """A function that is a tool, and how it is called."""

    def __init__(self, function: Callable[..., Any], name: str, marks: Mapping[str, Json]) -> None:
        self._function = function
        self._name = name
        self._marks = marks
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have no signature
            self._signature = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        span = self._begin(args, kwargs)
        if span is None:
            replaying = current_replay()
            asked = None if replaying is None else replaying.tool(*self._question(args, kwargs))
            return self._function(*args, **kwargs) if asked is None else asked.outcome()
        with use_context(span.context), _SpanEnder(span) as ended:
            given = outcome_for(span)
            if given is not None:
                return ended.with_result(given.outcome())
            return ended.with_result(self._function(*args, **kwargs))

    async def arun(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        span = self._begin(args, kwargs)
        if span is None:
            replaying = current_replay()
            asked = None if replaying is None else await replaying.atool(*self._question(args, kwargs))
            return await self._function(*args, **kwargs) if asked is None else asked.outcome()
        with use_context(span.context), _SpanEnder(span) as ended:
            given = await aoutcome_for(span)
            if given is not None:
                return ended.with_result(given.outcome())
            return ended.with_result(await self._function(*args, **kwargs))

    def _begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordingSpan | None:
        recorder = live_recorder()
        if recorder is None:
            return None
        with recorder.guard("tool"):
            facts = {
                names.TOOL_NAME: self._name,
                names.TOOL_ARGUMENTS: self._arguments(args, kwargs),
                names.TOOL_PURE: self._marks.get("pure"),
                names.TOOL_SIDE_EFFECTS: self._marks.get("side_effects"),
            }
            return recorder.start(names.EXECUTE_TOOL, self._name, context=place_of_call(), attributes=facts)
        return None

    def _question(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return current_agent(), self._name, None, self._arguments(args, kwargs), self._marks

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the arguments as JSON text, by parameter names if those are known."""
        held: dict[str, Any] = {**({"args": list(args)} if args else {}), **kwargs}
        if self._signature is not None:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError:  # the call itself will raise
                return dumps(_argument_json(held)).decode()
            bound.apply_defaults()
            held = dict(bound.arguments)
        own = next(iter(held), None)
        return dumps(
            {name: _argument_json(value) for name, value in held.items() if name != own or own not in _OWN}
        ).decode()


class _SpanEnder:
    """Ends a tool's span with its outcome. A class, because a generator costs twice as much."""

    __slots__ = ("_span",)

    def __init__(self, span: RecordingSpan) -> None:
        self._span = span

    def __enter__(self) -> _SpanEnder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if not self._span.attributes.get(names.REPLAYED):
                keep_raised(self._span, error)
            self._end(error)

    def with_result(self, value: Any) -> Any:
        span = self._span
        if type(value) is str:
            span.attributes[names.TOOL_RESULT] = value
        else:
            try:
                text = returned.write(value)
                span.attributes.update({names.TOOL_RESULT: text, names.TOOL_RETURNED: text})
            except Exception as error:  # noqa: BLE001 - a value of the program's may do anything when looked at
                span.attributes[names.TOOL_RESULT] = f"<{type(value).__qualname__}>"
                span.attributes[names.TOOL_RETURNED] = returned.write_lost(error)
                tell_unreturned(span.name, error)
        self._end(None)
        return value

    def _end(self, error: BaseException | None) -> None:
        recorder = live_recorder()
        if recorder is not None:
            with recorder.guard("tool", self._span):
                self._span.end(error=error)


def _argument_json(value: Any) -> Json:
    """Return an argument as JSON. For what JSON cannot express, its type, which is the same in every process."""
    try:
        return returned.encode(value)
    except Exception:  # noqa: BLE001 - a value of the program's may do anything when looked at
        if isinstance(value, dict):
            return {str(key): _argument_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_argument_json(item) for item in value]
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
