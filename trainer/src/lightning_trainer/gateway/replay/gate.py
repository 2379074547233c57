"""What the gateway does with a replay's request.

Answer it from the record, sample it again, or leave it to the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from lightning_spans.schema.replays import COUPLED, FORKED, REPLAYED
from lightning_spans.schema.spans import ERROR_TYPE, TOOL_RETURNED
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.calls.answers import Record
from lightning_trainer.gateway.calls.incoming import IncomingCall
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.asgi import ClientGoneError, run_unless_gone, send_bytes, send_json
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.replay.answer import (
    HEADER,
    LivePolicy,
    RecordedAnswer,
    error_of,
    is_verbatim,
    say,
    send_verbatim,
)
from lightning_trainer.gateway.replay.decisions import Decision, DrawnAnew, FromRecord, Own, ReplayRequest
from lightning_trainer.gateway.replay.record import RecordedTool
from lightning_trainer.gateway.replay.requests import read_request
from lightning_trainer.gateway.replay.session import ReplaySession
from lightning_trainer.gateway.replay.sessions import Sessions
from lightning_trainer.gateway.request.pending import PendingCall

ASKS: Final = b"asks"  # header of a request: its sender can send it to its own endpoint
OWN: Final = "own"  # header of a response: the request must be sent there


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A request of a replay, and the decision about it.

    Attributes:
        session: the replay.
        request: the request.
        decision: the decision.
    """

    session: ReplaySession
    request: ReplayRequest
    decision: Decision

    @property
    def model(self) -> str | None:
        """The policy that answers instead of the agent's own; None: the agent's own."""
        return self.decision.model if isinstance(self.decision, DrawnAnew) else None

    @property
    def is_drawn(self) -> bool:
        """Whether a policy answers."""
        return isinstance(self.decision, DrawnAnew) and self.decision.say is None

    @property
    def waits(self) -> bool:
        """Whether the answer never comes: in the record its agent was cancelled before it did."""
        return isinstance(self.decision, FromRecord) and self.decision.call.is_left

    def body(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of the request. Only the parts needed for the answer are read."""
        says = isinstance(self.decision, DrawnAnew) and self.decision.say is not None
        return {name: value for name, value in given.items() if not says or name != "previous_response_id"}

    def failed(self) -> None:
        """Note that a call failed before its answer."""
        self.session.release(self.request)

    async def send_as_it_was(self, pending: PendingCall, send: Send, record: Record, path: str) -> bool:
        """Send an answer of an agent's own endpoint unchanged, if possible.

        Raises:
            Refusal: it was an error.
        """
        decision = self.decision
        if not isinstance(decision, FromRecord):
            return False
        if decision.call.is_left:
            return False
        if decision.call.raw and (refusal := error_of(decision.call.node)) is not None:
            raise refusal
        if not is_verbatim(decision.call, path):
            return False
        return await send_verbatim(decision.call, pending, send, record, path)

    async def answer(
        self, pending: PendingCall, sender: ResponseSender, record: Record, policy: LivePolicy | None
    ) -> None:
        """Answer from the record, or with the replacement text.

        Raises:
            Refusal: the recorded answer is an error.
        """
        if isinstance(self.decision, FromRecord):
            await RecordedAnswer(self.decision.call, policy).answer(pending, sender, record)
        elif isinstance(self.decision, DrawnAnew) and self.decision.say is not None:
            await say(self.decision.say, pending, sender, record)


class ReplayGate:
    """Decides about the requests of replays, and returns recorded tool results to agents' processes.

    Args:
        sessions: of this server.
        access: checks keys.
        intake: reads bodies.
    """

    def __init__(self, sessions: Sessions, access: Access, intake: Intake) -> None:
        self._sessions = sessions
        self._access = access
        self._intake = intake

    def takes(self, grant: Grant) -> bool:
        """Whether a key belongs to an attempt that is a replay."""
        return grant.replay

    async def answer(self, call: IncomingCall) -> None:
        """Answer a model call from the record, have it sampled, or leave it to the program's own endpoint.

        Raises:
            Refusal: the replay has ended, or the recorded answer is an error.
        """
        step = await self._step(call)
        try:
            await _carry_out(step, call)
        except ClientGoneError:
            raise
        except Exception:
            step.failed()
            raise

    async def _step(self, call: IncomingCall) -> ReplayStep:
        """Decide about a model call, and mark its record. Its request is as it arrived."""
        pending = call.pending
        session = await self._sessions.of(str(pending.requested.grant.attempt_id))
        try:
            asked = call.surface.begin(pending.requested.request, pending.requested.grant.attempt_id).asked
        except Refusal:  # it can still be one of the program's own endpoint
            chat = None
        else:
            call.name_agent(asked)  # the record has it under that name
            chat = read_request(asked)
        span = (
            (pending.requested.trace_id, pending.requested.span_id)
            if pending.requested.trace_id and pending.requested.span_id
            else None
        )
        leaves = call.headers.get(HEADER.encode()) == ASKS
        sampled = not leaves or call.models.samples(pending.requested.agent, call.routing)
        request = ReplayRequest(
            pending.requested.agent, chat, read_request(pending.requested.request), span, sampled=sampled
        )
        decision = session.call(request)
        marks: dict[str, Any] = {}
        if isinstance(decision, FromRecord):
            marks = {REPLAYED: decision.call.call_id} | ({COUPLED: True} if decision.coupled else {})
        elif decision.fork is not None:
            marks = {FORKED: decision.fork.call_id, "draw": session.replay.draw}
        call.decide(seed=decision.seed if isinstance(decision, DrawnAnew) else None, marks=marks)
        return ReplayStep(session, request, decision)

    async def tool(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /v1/replay/tool``: the recorded result of a tool, or that it must run.

        Raises:
            Refusal: the replay has ended, or the request is malformed.
        """
        grant = await self._access.admit(scope, "attempt")
        body = await self._intake.object(scope, receive, grant)
        if not grant.replay or grant.attempt_id is None:
            raise Refusal(409, "this attempt is not a replay: run the tool", "conflict_error")
        name, arguments = body.get("name"), body.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise bad_request("name and arguments must be strings")
        about = (body.get("agent"), body.get("call_id"))
        agent, call_id = (value if isinstance(value, str) else None for value in about)
        session = await self._sessions.of(grant.attempt_id)
        found = session.tool(agent, name, call_id, arguments or "", side_effects=body.get("side_effects") is True)
        if found is None:
            await send_json(send, {"do": "run"})
            return
        await send_json(send, {"do": "give", **_outcome_fields(found)})


async def _carry_out(step: ReplayStep, call: IncomingCall) -> None:
    pending, record = call.pending, call.record.record
    if isinstance(step.decision, Own):
        await send_own(call.send)
    elif step.is_drawn:
        await call.sample(model=step.model)
    elif not await step.send_as_it_was(pending, call.send, record, call.surface.path):
        sender = call.open(step.body(pending.requested.request))
        given = step.answer(pending, sender, record, call.live_policy())
        await (run_unless_gone(call.receive, given) if step.waits else given)


def _outcome_fields(tool: RecordedTool) -> dict[str, Any]:
    """Return the fields from which an agent's process restores the tool's outcome."""
    return {
        "status": "error" if tool.failed else "ok",
        "result": tool.result,
        "returned": tool.marks.get(TOOL_RETURNED),
        "error": tool.error,
        "error_type": tool.marks.get(ERROR_TYPE),
    }


async def send_own(send: Send) -> None:
    """Tell an agent's process to send a call to its own endpoint."""
    message = "this call is not in the record and its agent is not trained: send it to your own endpoint"
    refusal = Refusal(421, message, "misdirected_request", "replay_own", {HEADER: OWN})
    await send_bytes(send, refusal.body(), status=421, extra=refusal.headers)
