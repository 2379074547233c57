"""One model call on its way through the gateway, and the deciders that may choose how it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from starlette.types import Receive, Send

from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.calls.models import ServedModel, ServedModels
from lightning_trainer.gateway.calls.recording import CallRecord
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.http.asgi import run_unless_gone
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.metrics import Metrics
from lightning_trainer.gateway.request.pending import AGENT_HEADER, PendingCall, SampledCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.surfaces.surface import Surface
from lightning_trainer.naming import agent_of

FELL_BACK: Final = "fell_back"  # in the sampling of a call: the policy that should have answered, and why it did not


def name_agent(
    pending: PendingCall, request: Mapping[str, Any], headers: Mapping[bytes, bytes], routing: Routing
) -> None:
    """Name the agent of a call by the rules, if the sender does not; `request` is a chat completion."""
    if routing.name_by and AGENT_HEADER not in headers:
        found = agent_of(routing.name_by, request, pending.routed.policy, headers)
        pending.requested = replace(pending.requested, agent=found or pending.requested.agent)


class Decider(Protocol):
    """Answers the calls of some attempts instead of the policies. It may also have a call sampled.

    See `Gateway.register`.
    """

    def takes(self, grant: Grant) -> bool:
        """Whether it handles the calls with this key."""
        ...

    async def answer(self, call: IncomingCall) -> None:
        """Answer a call, or have it sampled: `IncomingCall.sample`.

        Raises:
            Refusal: the call cannot be answered. The gateway records this and sends it to the client.
        """
        ...


@dataclass(slots=True)
class IncomingCall:
    """One model call.

    Attributes:
        surface: where it arrived.
        pending: its record so far.
        headers: of the request.
        routing: as it was when the request arrived.
        models: those that can answer.
        record: keeps the call.
        metrics: counts it while it is being answered.
        receive: of the request; read to notice that the client has gone.
        send: takes the response.
        sender: sends the answer in the surface's format; None before `open`.
    """

    surface: Surface
    pending: PendingCall
    headers: Mapping[bytes, bytes]
    routing: Routing
    models: ServedModels
    record: CallRecord
    metrics: Metrics
    receive: Receive
    send: Send
    sender: ResponseSender | None = None

    def open(self, body: Mapping[str, Any]) -> ResponseSender:
        """Read the request as a chat completion, and return the sender of its answer.

        Raises:
            Refusal: the surface does not accept it.
        """
        pending = self.pending
        exchange = self.surface.begin(body, pending.requested.grant.conversations)
        pending.requested = replace(
            pending.requested,
            request=exchange.asked,
            keeps_id=exchange.keeps_id,
            soft_limit=exchange.demands_limit,
            left_out=exchange.left_out,
        )
        self.name_agent(exchange.asked)
        self.sender = ResponseSender(self.send, exchange, pending)
        return self.sender

    def name_agent(self, request: Mapping[str, Any]) -> None:
        """Name the agent by the rules, if the sender does not; `request` is a chat completion."""
        name_agent(self.pending, request, self.headers, self.routing)

    def decide(self, *, seed: int | None, marks: Mapping[str, Any]) -> None:
        """Store what a decider gives: the seed, and marks for the record."""
        self.pending.routed = replace(self.pending.routed, seed=seed, marks=marks)

    def live_policy(self) -> ServedModel | None:
        """Return the model that answers the agent if no decider chooses another; None if there is none."""
        try:
            return self.models.route(self.pending, self.routing)
        except Refusal:
            return None

    async def sample(self, *, model: str | None = None, otherwise: str | None = None) -> None:
        """Let a policy answer.

        Args:
            model: the one that answers instead of the agent's own.
            otherwise: the one that answers if `model` rejects the call or fails before its answer has begun; the call's
                marks then say so. None: there is none.

        Raises:
            Refusal: the call cannot be answered.
            ClientGoneError: the client closed the connection.
        """
        sender = self.sender or self.open(self.pending.requested.request)
        try:
            await self._sample_from(model, sender)
        except Refusal as refusal:
            if otherwise is None or sender.started or self.record.begun:
                raise
            marks = {**self.pending.routed.marks, FELL_BACK: {"from": model, "error": str(refusal)}}
            self.pending.routed = replace(self.pending.routed, marks=marks)
            self.pending.sampled = SampledCall()
            await self._sample_from(otherwise, sender)

    async def _sample_from(self, model: str | None, sender: ResponseSender) -> None:
        policy = self.models.route(self.pending, self.routing, model)
        self.record.keeps = self.models.records(policy)
        with self.metrics.in_flight():
            await run_unless_gone(self.receive, policy.answer(self.pending, sender, self.record.record, self.routing))
