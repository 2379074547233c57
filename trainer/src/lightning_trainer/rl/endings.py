"""Every way an attempt can end, who is responsible, and how it counts: the one classification of all commands.

What the policy can cause once a model has answered counts as its failure. If it were left out, a policy would learn to
crash, to hang or to write long answers wherever success pays well, because only successes would count. What it cannot
cause is left out and retried. The exception that ended the attempt decides, not an earlier failed model call.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from typing import Final, Literal, TypeAlias

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus
from lightning_spans.schema.calls import Call
from lightning_spans.schema.replays import ENDED
from lightning_spans.schema.spans import ERROR_TYPE, Json
from lightning_trainer.choices import Timeouts
from lightning_trainer.reasons.call_errors import (
    CUT_CALLS,
    ENGINE_DOWN,
    ENGINE_ENDED,
    ENGINE_WAIT,
    LONG_WAIT_S,
    QUOTA_EXCEEDED,
    SCORER_FAILED,
    TOO_MUCH_AT_ONCE,
)

Responsible: TypeAlias = Literal["policy", "program", "infrastructure", "scorer", "nobody"]

LATE_LEFT_OUT: Final = (
    "WARNING: timeouts = exclude leaves out what was too slow after a model had answered. The policy can bring that"
    " about: it may learn to hang, and to write answers that take too long. Use it only where slow machines are to"
    " blame."
)
LATE_LEFT_OUT_OF_FIGURES: Final = (
    "WARNING: timeouts = exclude leaves out what was too slow after a model had answered, so that an agent that hangs"
    " seems better than it is. Use it only where slow machines are to blame."
)
_STATUS: Final = "http.response.status_code"  # of OpenTelemetry's conventions, on the chat spans of the openai client
_TOO_SLOW: Final = 408  # the request did not arrive, or was not answered, in time
_TOO_MANY: Final = 429
_SERVER_ERRORS: Final = 500
_IMPLICIT: Final = "\nDuring handling of the above exception, another exception occurred:\n"
# How the gateway's own failures begin, for records without a status. Any other rejected request is the caller's fault.
_OURS: Final = (
    "the store can't",
    "the model's server",
    "the engine failed",
    "the gateway failed",
    "the server stopped",
)
_COMMAND: Final = ("the command ended with ", "the command was killed ")  # how a command's errors begin
_LATE: Final = re.compile(r"^(?:[\w.]+\.)?(?:TimeoutError|CancelledError)\b")
_LATE_TYPE: Final = re.compile(r"Timeout|Cancel|Abort")
_TELLING: Final = 20  # characters of an error's message that no other error is likely to have


class Ending(Enum):
    """How an attempt ended: in words, and who is responsible."""

    SUCCEEDED = "the program ended and its reward is known", "nobody"
    CRASHED = "the program failed after a model had answered", "policy"
    TIMED_OUT = "the attempt reached its time limit after a model had answered", "policy"
    CALL_CUT = "the program gave up on a model call that was being answered", "policy"
    OVER_QUOTA = "the attempt had used up a quota of its key", "policy"
    NO_ANSWER = "the attempt ended before any model had answered", "program"
    SERVER_FAILED = "a model server failed or could not be reached", "infrastructure"
    ENGINE_DOWN = (
        "a call failed or lost its time because its engine was down or taking new weights",
        "infrastructure",
    )
    LOST = "the runner or its lease was lost", "infrastructure"
    RELEASED = "the attempt was given back by its runner", "infrastructure"
    DISTURBED = (
        "its worker process ended while other attempts ran there, or was killed from outside",
        "infrastructure",
    )
    CANCELLED = "the rollout was cancelled", "nobody"
    FORK_ENDED = "a replay deviated from the recording", "nobody"
    SCORER_FAILED = SCORER_FAILED, "scorer"
    UNJUDGED = "the judge gave no verdict", "scorer"

    @classmethod
    def from_slug(cls, slug: str) -> Ending:
        """Parse the result of `slug`."""
        return cls[slug.upper()]

    @property
    def slug(self) -> str:
        """Its name in JSON and in metrics."""
        return self.name.lower()

    @property
    def text(self) -> str:
        """What happened, for people."""
        return self.value[0]

    @property
    def responsible(self) -> Responsible:
        """Who caused it."""
        return self.value[1]

    @property
    def is_late(self) -> bool:
        """Whether a slow machine can have the same effect as the policy: `timeouts` says how it counts."""
        return self in (Ending.TIMED_OUT, Ending.CALL_CUT)

    def is_policys(self, timeouts: Timeouts = "count") -> bool:
        """Whether it counts as a failure of the policy."""
        return self.responsible == "policy" and not (self.is_late and timeouts == "exclude")


_EXCUSES: Final = 0.25  # share of the time
_BY_STATUS: Final[dict[AttemptStatus, Ending]] = {
    "succeeded": Ending.SUCCEEDED,
    "lost": Ending.LOST,
    "released": Ending.RELEASED,
    "disturbed": Ending.DISTURBED,
    "cancelled": Ending.CANCELLED,
}
_BY_ERROR: Final = {SCORER_FAILED: Ending.SCORER_FAILED, f"{ENGINE_DOWN}: ": Ending.ENGINE_DOWN}


def needs_trace(attempt: AttemptRecord) -> bool:
    """Whether an attempt's calls are needed to classify its end; otherwise its record is enough."""
    known = ended_early(attempt) or _ending_in_record(attempt) is not None
    return attempt.status in ("failed", "timeout") and not known


def _ending_in_record(attempt: AttemptRecord) -> Ending | None:
    """Return the ending that the error of an attempt's record names; None if its calls tell how it ended."""
    error = (attempt.error or "") if attempt.status == "failed" else ""
    return next((kind for prefix, kind in _BY_ERROR.items() if error.startswith(prefix)), None)


def ended_early(attempt: AttemptRecord) -> bool:
    """Whether an attempt was meant to replay another and differed from it.

    Nobody's failure, and nothing to learn from.
    """
    return attempt.rollout.replay is not None and ENDED in (attempt.error or "")


def ending_of(attempt: AttemptRecord, trace: Trace | None) -> Ending:
    """Classify how an attempt ended.

    Args:
        attempt: it has ended.
        trace: what is known of its calls; None if nothing is.
    """
    if (known := _BY_STATUS.get(attempt.status)) is not None:
        return known
    if ended_early(attempt):
        return Ending.FORK_ENDED
    if (named := _ending_in_record(attempt)) is not None:
        return named
    chats = () if trace is None else trace.chats
    answered = any(_policy_spoke(chat) for chat in chats)
    if answered and attempt.status != "timeout":
        return _ending_of_failure(attempt, chats)
    last = _last_failures(chats)
    if attempt.status == "timeout" and _lost_to_engine(attempt, chats):
        last.add(Ending.ENGINE_DOWN)
    otherwise = Ending.TIMED_OUT if answered else Ending.NO_ANSWER
    return next((kind for kind in (Ending.ENGINE_DOWN, Ending.SERVER_FAILED) if kind in last), otherwise)


def engine_fault(trace: Trace) -> str | None:
    """Return why the result of an attempt does not count: its engine failed a call, which was not answered later.

    The reward makes no difference: if only results with a low one were left out, those that count would be too good. A
    call that was made again (by the same agent, with the same messages) and answered has cost the program nothing.

    Args:
        trace: of an attempt whose program ended with a reward.

    Returns:
        The error of the attempt; None if its result counts.
    """
    failed = (chat for chat in trace.chats if _failure_of(chat) is Ending.ENGINE_DOWN)
    missed = next((chat for chat in failed if not any(_is_made_again(chat, other) for other in trace.chats)), None)
    if missed is None:
        return None
    agent = f" of {missed.path}" if missed.path else ""
    why = (missed.error or "").strip().partition("\n")[0][:200]
    return f"{ENGINE_DOWN}: a call{agent} failed and was not answered later, so the reward does not count ({why})"


def _is_made_again(failed: Node, other: Node) -> bool:
    """Whether a call repeats a failed one, and was answered."""
    if failed.call is None or other.call is None or other.call.error is not None:
        return False
    same = failed.path == other.path and _messages_of(failed.call) == _messages_of(other.call)
    return same and other.span.end_ns >= failed.span.start_ns


def _messages_of(call: Call) -> Json:
    return call.request.get("messages") or call.request.get("prompt")


def _ending_of_failure(attempt: AttemptRecord, chats: Sequence[Node]) -> Ending:
    """Classify how a failed attempt ended: with a model call's failure, or with the program's own exception."""
    error = attempt.error or ""
    exception = error.rpartition(_IMPLICIT)[2]
    named = {_failure_of(chat) for chat in chats if not error.startswith(_COMMAND) and _names(exception, chat)}
    last = _last_failures(chats)
    is_late = error.startswith(_COMMAND) or _is_late(exception)
    for kind in (Ending.SERVER_FAILED, Ending.ENGINE_DOWN, Ending.OVER_QUOTA, Ending.CALL_CUT):
        if kind in named or (kind in last and (is_late or kind is not Ending.CALL_CUT)):
            return kind
    if _is_late(exception) and _lost_to_engine(attempt, chats):
        return Ending.ENGINE_DOWN
    return Ending.CRASHED


def _is_late(exception: str) -> bool:
    return _LATE.match(exception.strip().rpartition("\n")[2]) is not None


def _lost_to_engine(attempt: AttemptRecord, chats: Sequence[Node]) -> bool:
    """Whether an attempt lost much of its time because its engine could not sample: by no fault of the policy."""
    took_s = ((attempt.ended_ns or 0) - attempt.started_ns) / 1e9
    return is_long_wait(sum(map(_wait_of, chats)), took_s)


def _is_engine_wait(chat: Node) -> bool:
    """Whether a call lost much of its time because its engine could not sample."""
    return is_long_wait(_wait_of(chat), ((chat.span.end_ns or 0) - chat.span.start_ns) / 1e9)


def is_long_wait(waited_s: float, took_s: float) -> bool:
    """Whether a wait for the engine excuses what ran out of time: at least 1 s, and a quarter of the time it took.

    With `staleness`, nearly every attempt waits for new weights for a while. A policy whose attempts would have run out
    of time in any case must not be excused by that.
    """
    return waited_s >= max(LONG_WAIT_S, _EXCUSES * took_s)


def _wait_of(chat: Node) -> float:
    waited = None if chat.call is None else chat.call.sampling.get(ENGINE_WAIT)
    return float(waited) if isinstance(waited, (int, float)) else 0.0


def _last_failures(chats: Sequence[Node]) -> set[Ending]:
    """Classify the failed model calls after which none was answered, so that the program could not continue."""
    answered_ns = max((chat.span.start_ns for chat in chats if _policy_spoke(chat)), default=0)
    recorded = {chat.path for chat in chats if chat.call is not None}
    last = [chat for chat in chats if chat.span.end_ns >= answered_ns and not _is_mere_claim(chat, recorded)]
    return {kind for chat in last if (kind := _failure_of(chat)) is not None}


def _is_mere_claim(chat: Node, recorded: Container[str | None]) -> bool:
    """Whether only the agent's span says that a server failed a call, and the gateway would have a record of it.

    The agent's process writes the span. Without a check, a policy could crash at no cost.

    Args:
        chat: a model call.
        recorded: paths of the agents whose calls the gateway records.
    """
    answered = chat.call is None and _claimed_status(chat) is not None  # otherwise there was no connection
    return answered and chat.path in recorded and _failure_of(chat) is Ending.SERVER_FAILED


def _policy_spoke(chat: Node) -> bool:
    """Whether a model answered a call, or had begun to when it was cut off."""
    call = chat.call
    if chat.error is None or (call is not None and call.error is None):
        return True
    if call is None or call.error not in CUT_CALLS:
        return False
    if _is_engine_wait(chat):
        return any(choice.token_ids for choice in call.choices)
    # The embedded engine adds its choices as it begins; an upstream that answers as a whole has none before the end.
    return not call.choices or any(choice.token_ids or choice.message for choice in call.choices)


def _failure_of(chat: Node) -> Ending | None:
    """Classify the failure of a model call; None if it was answered, or rejected because of its content.

    If the gateway has recorded the call, only its record counts: the agent's process writes the span.
    """
    if chat.error is None or (chat.call is not None and chat.call.error is None):
        return None
    if chat.call is not None:
        return _ending_in_call(chat, chat.call)
    if (status := _claimed_status(chat)) is not None:
        return _of_status(status, chat.error)
    late = _LATE_TYPE.search(str(chat.span.attributes.get(ERROR_TYPE, "")))
    return Ending.CALL_CUT if late else Ending.SERVER_FAILED


def _ending_in_call(chat: Node, call: Call) -> Ending | None:
    """Classify the failure of a call that the gateway has recorded."""
    if call.error in CUT_CALLS:
        return Ending.ENGINE_DOWN if _is_engine_wait(chat) else Ending.CALL_CUT
    if call.sampling.get(ENGINE_ENDED):
        return Ending.ENGINE_DOWN
    refusal = call.sampling.get("error")
    status = _number(refusal.get("status")) if isinstance(refusal, Mapping) else None
    if status is not None:
        return _of_status(status, f"{call.error} {refusal}")
    return Ending.SERVER_FAILED if (call.error or "").startswith(_OURS) else None


def _of_status(status: int, told: str) -> Ending | None:
    if status == _TOO_SLOW:
        return Ending.CALL_CUT
    if status == _TOO_MANY and (QUOTA_EXCEEDED in told or TOO_MUCH_AT_ONCE in told):
        return Ending.OVER_QUOTA
    return Ending.SERVER_FAILED if status >= _SERVER_ERRORS or status == _TOO_MANY else None


def _claimed_status(chat: Node) -> int | None:
    """Return the HTTP status with which a failed call was answered, by its span; None if it is unknown."""
    return _number(chat.span.attributes.get(_STATUS))


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float, str)) and str(value).isdigit() else None


def _names(text: str, chat: Node) -> bool:
    """Whether the text of an exception is, or contains, that of a failed call."""
    kind = str(chat.span.attributes.get(ERROR_TYPE, ""))
    message = (chat.error or "").strip().partition("\n")[0][:200]
    if message and message != kind and message in text:
        return len(message) >= _TELLING or kind in text
    return bool(kind) and re.search(rf"\b{re.escape(kind)}:?\s*$", text, re.MULTILINE) is not None
