"""Tools in a replay: what a tool gave in the record is put in the place of its own code, so that nothing happens twice.

A plugin wraps the innermost place where a framework runs a tool's own code with `called` or `acalled`. Outside of a
replay these keep what the code returned or raised, where the text that the model is told is not the same. In a replay
they ask the gateway, once for each span: it gives what the record has, or says that the tool is to run.
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
from lightning_spans.record.returned import Returned, error_of, read, write, write_again, write_error
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
TIMEOUT_S: Final = 60.0  # to connect, and for each part of the answer; the gateway has it in memory
_told: Final[set[tuple[str, str]]] = set()  # tools and types of which was told that they do not come back


@dataclass(frozen=True, slots=True)
class Given:
    """What the record has of a tool call.

    Attributes:
        result: as the model was told it, as text.
        failed: whether it was an error.
        error: the error's text; empty where there was none.
        error_type: the qualified name of what was raised, where that is known.
        returned: what the tool's own code returned or raised, as `record.returned` writes it; None: `result` says it.
    """

    result: str = ""
    failed: bool = False
    error: str = ""
    error_type: str = ""
    returned: str | None = None

    def outcome(self) -> Any:
        """Return what the tool's own code returned, or raise what it raised.

        Raises:
            ReplayEndedError: what is recorded can't be read by this program.
            Exception: what the tool raised in the record.
        """
        return self.whole().outcome()

    def whole(self) -> Returned:
        """Read what the tool's own code returned or raised: kept whole, else made from the texts."""
        try:
            if self.returned is not None:
                return read(self.returned)
            if self.failed:
                return Returned(error=error_of(self.error_type, self.error or self.result))
            return Returned(self.result)
        except ValueError as error:
            raise ReplayEndedError(f"what a tool gave in the record can't be read: {error}") from None


class Replaying:
    """Asks the gateway what a replay's record has of the tools that the program calls.

    Args:
        attempt: one that is a replay, with endpoint and key.
    """

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def tool(
        self, agent: str | None, name: str, call_id: str | None, arguments: str, marks: Mapping[str, Json] | None = None
    ) -> Given | None:
        """Return what the record has of a tool call; None: run it.

        Args:
            agent: whose call it is.
            name: of the tool.
            call_id: the model's name for the call, where it has one.
            arguments: JSON text.
            marks: ``pure`` or ``side_effects``, where the tool is marked so.

        Raises:
            ReplayEndedError: the record has no such call, or the tool is refused, or the gateway can't be asked.
        """
        asked = {"agent": agent, "name": name, "call_id": call_id, "arguments": arguments, **(marks or {})}
        return _read(name, self._ask(name, dumps(asked)))

    async def atool(
        self, agent: str | None, name: str, call_id: str | None, arguments: str, marks: Mapping[str, Json] | None = None
    ) -> Given | None:
        """As `tool`, while the event loop goes on. Calls that are made at once are answered in their order.

        Some frameworks tell the model results in the order in which they came.
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
            # It is not run instead: in a replay nothing may happen twice.
            raise ReplayEndedError(f"the gateway can't be asked what {name!r} gave in the record: {error!r}") from None


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


def _read(name: str, answer: HttpResponse) -> Given | None:
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
    given = Given(
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
    """Return what answers for the replay that runs here; None where none does."""
    attempt = current_attempt()
    return None if attempt is None or attempt.replay is None else Replaying(attempt)


# A tool's span is asked for once. A call passes several layers of a framework, each of which may be wrapped, and a
# framework may call a tool that failed again, in the same span.


def tool_around() -> RecordingSpan | None:
    """Return the span of the tool whose own code is about to run here; None where that is no tool's."""
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


def _take(span: RecordingSpan, given: Given | None) -> Given | None:
    """Note on a tool's span that its result is given; None where its own code is to run."""
    if given is None or (given.returned is not None and given.whole().again):
        return None
    span.given = given
    span.attributes[names.REPLAYED] = True
    if given.returned is not None:
        span.attributes[names.TOOL_RETURNED] = given.returned
    if given.failed and given.error_type:  # a framework may only tell that it failed
        span.attributes[names.ERROR_TYPE] = given.error_type
    return given


def given_to(span: RecordingSpan) -> Given | None:
    """Return what a replay's record gives for the tool of a span; None where its own code is to run.

    Raises:
        ReplayEndedError: as `Replaying.tool`.
    """
    asker = _asker(span)
    return span.given if asker is None else _take(span, asker.tool(*_question(span)))


async def agiven_to(span: RecordingSpan) -> Given | None:
    """As `given_to`, while the event loop goes on."""
    asker = _asker(span)
    return span.given if asker is None else _take(span, await asker.atool(*_question(span)))


def keep_returned(span: OpenSpan, value: object) -> None:
    """Keep on its span what a tool's own code returned, unless it is text: that is what the model is told."""
    if type(value) is str:
        span.attributes.pop(names.TOOL_RETURNED, None)
    else:
        keep_whole(span, value)


def keep_whole(span: OpenSpan, value: object) -> None:
    """Keep on its span what a tool's own code returned, be it text."""
    try:
        span.attributes[names.TOOL_RETURNED] = write(value)
    except Exception as error:  # noqa: BLE001 - a value of the program's may do anything when it is looked at
        span.attributes.pop(names.TOOL_RETURNED, None)
        tell_unreturned(span.name, error)


def keep_raised(span: OpenSpan, error: BaseException, *, waits: bool = False) -> None:
    """Keep on its span what a tool's own code raised; frameworks tell the model something else."""
    if isinstance(error, ReplayEndedError):
        return
    try:
        span.attributes[names.TOOL_RETURNED] = write_again() if waits else write_error(error)
    except Exception as raised:  # noqa: BLE001 - logged
        log_failure("what a tool raised", raised, span)


def tell_unreturned(name: str, error: Exception) -> None:
    """Log, once for a tool and a type, that what a tool returns does not come back in a replay."""
    if (name, str(error)) not in _told:
        _told.add((name, str(error)))
        logger.warning("lightning: what the tool %r returns holds %s, which can't be kept for a replay", name, error)


def called(
    run: Callable[[], T],
    outcome: Callable[[Given], T] = Given.outcome,
    *,
    keep: Callable[[OpenSpan, T], None] = keep_returned,
    waits: Callable[[BaseException], bool] = lambda _: False,
) -> T:
    """Run a tool's own code, or return or raise what it did in the record.

    Args:
        run: its own code.
        outcome: makes what the code would have returned or raised of what the record has.
        keep: keeps on the span what the code returned.
        waits: whether an exception is the framework's way to wait for somebody; the tool will be called again then.

    Raises:
        ReplayEndedError: as `Replaying.tool`.
    """
    span = tool_around()
    if span is None:
        return run()
    given = given_to(span)
    if given is not None:
        return outcome(given)
    try:
        answer = run()
    except BaseException as error:
        keep_raised(span, error, waits=waits(error))
        raise
    keep(span, answer)
    return answer


async def acalled(
    run: Callable[[], Awaitable[T]],
    outcome: Callable[[Given], T] = Given.outcome,
    *,
    keep: Callable[[OpenSpan, T], None] = keep_returned,
    waits: Callable[[BaseException], bool] = lambda _: False,
) -> T:
    """As `called`, of code that is awaited."""
    span = tool_around()
    if span is None:
        return await run()
    given = await agiven_to(span)
    if given is not None:
        return outcome(given)
    try:
        answer = await run()
    except BaseException as error:
        keep_raised(span, error, waits=waits(error))
        raise
    keep(span, answer)
    return answer
