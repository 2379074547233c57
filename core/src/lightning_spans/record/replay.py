"""Tools in a replay: the recorded result replaces the tool's own code, so that nothing happens twice.

A plugin wraps the innermost function that runs a tool's own code with `run_or_replay` or `arun_or_replay`. Outside a
replay these record what the code returned or raised, if the model's text differs from it. In a replay they ask the
gateway, once per span: it returns the recorded result, or says that the tool must run.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_spans.errors import ReplayEndedError
from lightning_spans.record.context import current_attempt
from lightning_spans.record.delivery.http import HttpResponse, Posts
from lightning_spans.record.process import in_child
from lightning_spans.record.recorder import RecordingSpan, current_span, log_failure
from lightning_spans.record.redaction import MASK
from lightning_spans.record.returned import RestoredValue, error_of, read, write, write_again, write_error
from lightning_spans.record.stalls import waiting
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps, loads

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.spans import Json

logger = logging.getLogger("lightning_spans")
T = TypeVar("T")

PATH: Final = "/v1/replay/tool"
TIMEOUT_S: Final = 60.0  # to connect, and for each part of the response; the gateway has it in memory
_told: Final[set[tuple[str, str]]] = set()  # tools and types for which a warning about replays was logged


@dataclass(frozen=True, slots=True)
class RecordedOutcome:
    """The recorded outcome of a tool call.

    Attributes:
        result: the text that the model got.
        failed: whether it was an error.
        error: the error's text; empty if there was none.
        error_type: the qualified name of the exception's class, if known.
        returned: what the tool's own code returned or raised, as `record.returned` writes it; None: `result` is it.
    """

    result: str = ""
    failed: bool = False
    error: str = ""
    error_type: str = ""
    returned: str | None = None

    def outcome(self) -> Any:
        """Return what the tool's own code returned, or raise what it raised.

        Raises:
            ReplayEndedError: this program cannot read the recorded value.
            Exception: the recorded exception of the tool.
        """
        return self.whole().outcome()

    def whole(self) -> RestoredValue:
        """Return what the tool's own code returned or raised: as recorded, otherwise made from the texts."""
        try:
            if self.returned is not None:
                return read(self.returned)
            if self.failed:
                return RestoredValue(error=error_of(self.error_type, self.error or self.result))
            return RestoredValue(self.result)
        except ValueError as error:
            raise ReplayEndedError(f"what a tool gave in the record can't be read: {error}") from None


class Replaying:
    """Asks the gateway for the recorded outcomes of a replayed program's tools.

    Args:
        attempt: a replay, with endpoint and key.
    """

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def tool(
        self, agent: str | None, name: str, call_id: str | None, arguments: str, marks: Mapping[str, Json] | None = None
    ) -> RecordedOutcome | None:
        """Return the recorded outcome of a tool call; None: run it.

        Args:
            agent: the calling agent.
            name: of the tool.
            call_id: the model's id of the call, if it has one.
            arguments: JSON text.
            marks: ``pure`` or ``side_effects``, if the tool is marked so.

        Raises:
            ReplayEndedError: the call is not recorded, the tool is refused, or the gateway cannot be reached.
        """
        asked = {"agent": agent, "name": name, "call_id": call_id, "arguments": arguments, **(marks or {})}
        return _read(name, self._ask(name, dumps(asked)))

    async def atool(
        self, agent: str | None, name: str, call_id: str | None, arguments: str, marks: Mapping[str, Json] | None = None
    ) -> RecordedOutcome | None:
        """Return the recorded outcome while the event loop runs; see `tool`. Parallel calls are answered in order.

        Some frameworks pass results to the model in the order in which they arrive.
        """
        ask = partial(copy_context().run, self.tool, agent, name, call_id, arguments, marks)
        return await asyncio.get_running_loop().run_in_executor(_line(), ask)

    def _ask(self, name: str, body: bytes) -> HttpResponse:
        endpoint, key = self._attempt.endpoint, self._attempt.key
        if not endpoint:
            raise ReplayEndedError(f"the tool {name!r} is called in a replay, but LIGHTNING_ENDPOINT is not set.")
        headers = {"content-type": "application/json", "authorization": f"Bearer {key or ''}"}
        try:
            with waiting("replayed tool", f"the recorded result of {name!r}"):
                return _posts(f"{endpoint}{PATH}", body, headers)
        except (OSError, http.client.HTTPException) as error:
            # The tool is not run instead: in a replay nothing may happen twice.
            raise ReplayEndedError(f"the gateway does not return the recorded result of {name!r}: {error!r}") from None


_posts: Final = Posts(TIMEOUT_S)
_asking: ThreadPoolExecutor | None = None


def _line() -> ThreadPoolExecutor:
    """Return the one thread in which coroutines ask."""
    global _asking  # noqa: PLW0603 - made when it is first needed, which nearly no process does
    if _asking is None:
        _asking = ThreadPoolExecutor(1, thread_name_prefix="lightning-replay")
    return _asking


def _after_fork() -> None:
    global _asking  # noqa: PLW0603 - the thread is the parent's
    _asking = None


in_child(_after_fork)


def _read(name: str, answer: HttpResponse) -> RecordedOutcome | None:
    try:
        told = loads(answer.content)
        error = told.get("error") if answer.status != 200 else None
    except (ValueError, AttributeError):
        raise ReplayEndedError(f"the gateway answers {answer.status} to what {name!r} gave in the record") from None
    if answer.status != 200:
        message = error.get("message") if isinstance(error, dict) else None
        raise ReplayEndedError(message or f"the gateway answers {answer.status} to what {name!r} gave in the record")
    if told.get("do") == "run":
        return None
    if told.get("result") is None and told.get("returned") is None and told.get("status") != "error":
        raise ReplayEndedError(f"the record does not say what {name!r} gave.")
    given = RecordedOutcome(
        result=told.get("result") or "",
        failed=told.get("status") == "error",
        error=told.get("error") or "",
        error_type=told.get("error_type") or "",
        returned=told.get("returned"),
    )
    if MASK in given.result or MASK in (given.returned or ""):
        raise ReplayEndedError(f"what {name!r} gave is masked in the record, so it can't be given again.")
    return given


def current_replay() -> Replaying | None:
    """Return the object that answers for the current replay; None if there is none."""
    attempt = current_attempt()
    return None if attempt is None or attempt.replay is None else Replaying(attempt)


# The outcome is requested once per tool span. A call passes several layers of a framework, each of which may be
# wrapped, and a framework may call a failed tool again within the same span.


def tool_around() -> RecordingSpan | None:
    """Return the span of the tool whose own code is about to run here; None if that is no tool's code."""
    span = current_span()
    return span if span is not None and span.operation == names.EXECUTE_TOOL else None


def _asker(span: RecordingSpan) -> Replaying | None:
    if span.attempt is None or span.attempt.replay is None or names.REPLAYED in span.attributes:
        return None
    span.attributes[names.REPLAYED] = False
    return Replaying(span.attempt)


def _question(span: RecordingSpan) -> tuple[str | None, str, str | None, str, dict[str, Json]]:
    known = span.attributes
    marks = {"pure": names.TOOL_PURE, "side_effects": names.TOOL_SIDE_EFFECTS}
    told = {mark: True for mark, attribute in marks.items() if known.get(attribute)}
    arguments = known.get(names.TOOL_ARGUMENTS) or ""
    return span.agent, known.get(names.TOOL_NAME) or span.name, known.get(names.TOOL_CALL_ID), arguments, told


def _take(span: RecordingSpan, given: RecordedOutcome | None) -> RecordedOutcome | None:
    """Note on a tool's span that its outcome was replayed; None if its own code must run."""
    if given is None or (given.returned is not None and given.whole().again):
        return None
    span.given = given
    span.attributes[names.REPLAYED] = True
    if given.returned is not None:
        span.attributes[names.TOOL_RETURNED] = given.returned
    if given.failed and given.error_type:  # a framework may only report that it failed
        span.attributes[names.ERROR_TYPE] = given.error_type
    return given


def outcome_for(span: RecordingSpan) -> RecordedOutcome | None:
    """Return the replayed outcome for a tool's span; None if its own code must run.

    Raises:
        ReplayEndedError: see `Replaying.tool`.
    """
    asker = _asker(span)
    return span.given if asker is None else _take(span, asker.tool(*_question(span)))


async def aoutcome_for(span: RecordingSpan) -> RecordedOutcome | None:
    """Return the replayed outcome while the event loop runs; see `outcome_for`."""
    asker = _asker(span)
    return span.given if asker is None else _take(span, await asker.atool(*_question(span)))


def keep_returned(span: OpenSpan, value: object) -> None:
    """Record on its span what a tool's own code returned, unless it is text: then it is what the model got."""
    if type(value) is str:
        span.attributes.pop(names.TOOL_RETURNED, None)
    else:
        keep_whole(span, value)


def keep_whole(span: OpenSpan, value: object) -> None:
    """Record on its span what a tool's own code returned, even if it is text."""
    try:
        span.attributes[names.TOOL_RETURNED] = write(value)
    except Exception as error:  # noqa: BLE001 - a value of the program's may do anything when it is looked at
        span.attributes.pop(names.TOOL_RETURNED, None)
        tell_unreturned(span.name, error)


def keep_raised(span: OpenSpan, error: BaseException, *, waits: bool = False) -> None:
    """Record on its span what a tool's own code raised; frameworks tell the model something else."""
    if isinstance(error, ReplayEndedError):
        return
    try:
        span.attributes[names.TOOL_RETURNED] = write_again() if waits else write_error(error)
    except Exception as raised:  # noqa: BLE001 - logged
        log_failure("what a tool raised", raised, span)


def _keep(keep: Callable[[OpenSpan, T], None], span: OpenSpan, answer: T) -> None:
    """Let a plugin record what a tool's own code returned. The tool has run, so an error here is only logged."""
    try:
        keep(span, answer)
    except Exception as error:  # noqa: BLE001 - logged
        span.attributes.pop(names.TOOL_RETURNED, None)
        log_failure("recording what a tool returned", error, span)


def tell_unreturned(name: str, error: Exception) -> None:
    """Log, once per tool and type, that a tool's returned value cannot be replayed."""
    if (name, str(error)) not in _told:
        _told.add((name, str(error)))
        logger.warning("lightning: what the tool %r returns holds %s, which can't be kept for a replay", name, error)


def run_or_replay(
    run: Callable[[], T],
    outcome: Callable[[RecordedOutcome], T] = RecordedOutcome.outcome,
    *,
    keep: Callable[[OpenSpan, T], None] = keep_returned,
    waits: Callable[[BaseException], bool] = lambda _: False,
) -> T:
    """Run a tool's own code, or return or raise its recorded outcome.

    Args:
        run: its own code.
        outcome: converts the record to what the code would have returned or raised.
        keep: records on the span what the code returned.
        waits: whether an exception is the framework's way to wait; the tool will then be called again.

    Raises:
        ReplayEndedError: see `Replaying.tool`.
    """
    span = tool_around()
    if span is None:
        return run()
    given = outcome_for(span)
    if given is not None:
        return outcome(given)
    try:
        answer = run()
    except BaseException as error:
        keep_raised(span, error, waits=waits(error))
        raise
    _keep(keep, span, answer)
    return answer


async def arun_or_replay(
    run: Callable[[], Awaitable[T]],
    outcome: Callable[[RecordedOutcome], T] = RecordedOutcome.outcome,
    *,
    keep: Callable[[OpenSpan, T], None] = keep_returned,
    waits: Callable[[BaseException], bool] = lambda _: False,
) -> T:
    """Run or replay asynchronous code; see `run_or_replay`."""
    span = tool_around()
    if span is None:
        return await run()
    given = await aoutcome_for(span)
    if given is not None:
        return outcome(given)
    try:
        answer = await run()
    except BaseException as error:
        keep_raised(span, error, waits=waits(error))
        raise
    _keep(keep, span, answer)
    return answer
