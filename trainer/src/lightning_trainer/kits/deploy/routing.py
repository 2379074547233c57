"""Chooses the policy that answers a call of a deployed agent: the stable policy or, in a canary, the candidate."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import dumps
from lightning_spans.store import Store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import Where
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.calls.incoming import IncomingCall
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.kits.deploy.program_watch import ProgramWatches
from lightning_trainer.kits.deploy.table import AgentPolicies
from lightning_trainer.policies import Policies
from lightning_trainer.session.fingerprint import ProgramFingerprint

logger = logging.getLogger(__name__)
CONVERSATION_HEADER: Final = b"x-lightning-conversation"
MARK: Final = "deployment"  # in the sampling of a call: number of the deployment that chose its policy
CONVERSATION: Final = "conversation"  # likewise: name of the conversation; calls of an attempt use the attempt's id
_LONGEST: Final = 200  # characters of a conversation's name
_REMEMBERED: Final = 100_000  # conversations in memory; the store has all of them


class Copier(Protocol):
    """Lets candidates answer copies of live calls."""

    def offer(self, call: IncomingCall, deployment: Deployment, conversation: str) -> None:
        """Accept a copy of a call that was answered. Never waits and never raises."""
        ...


class DeploymentRouter:
    """Assigns each conversation of a deployed agent to one policy, and leaves all other calls unchanged.

    A conversation is an attempt. Outside of attempts it is named by the header ``x-lightning-conversation``, or
    consists of all calls whose messages start identically. The store records its policy.

    Args:
        store: contains the assignments.
        copier: gets copies of the calls of agents whose candidate is in a shadow; None: no copies are made.
        alarm: called for each change of an agent's program since the evaluation.
    """

    def __init__(self, store: Store, copier: Copier | None = None, *, alarm: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._copier = copier
        self._alarm = alarm
        self._watches = ProgramWatches()
        self._agents: Mapping[str, AgentPolicies] = {}
        self._names = Policies()
        self._assigned: OrderedDict[tuple[str, str], str] = OrderedDict()

    def update(self, agents: Mapping[str, AgentPolicies]) -> None:
        """Route new calls according to these deployments. May be called from any thread."""
        self._names, self._agents = Policies({name: name for name in agents}), agents

    def takes(self, grant: Grant) -> bool:
        """Whether the agent of a call may be a deployed one. A replay is answered from its record."""
        return bool(self._agents) and not grant.replay

    async def answer(self, call: IncomingCall) -> None:
        """Answer a call with the assigned policy.

        Raises:
            Refusal: the stable policy cannot answer.
            ClientGoneError: the client closed the connection.
        """
        call.open(call.pending.requested.request)
        agents, name = self._agents, self._names.of(call.pending.requested.agent)
        policies = agents.get(name) if name is not None else None
        if name is None or policies is None:
            await call.sample()
            return
        served = call.models.by_name()
        stable = _stable(policies, served)
        conversation = conversation_of(call)
        chosen = await self._chosen(name, conversation, policies, served)
        if chosen not in served or not policies.may_answer(chosen):
            chosen = stable
        named = {} if call.pending.requested.grant.attempt_id is not None else {CONVERSATION: conversation}
        call.decide(seed=None, marks={MARK: policies.current.number, **named})
        await call.sample(model=chosen, otherwise=None if chosen == stable else stable)
        if self._copier is not None and _is_copied(policies.current, conversation):
            self._copier.offer(call, policies.current, conversation)
        if policies.evaluated is not None:
            self._compare_program(name, policies.evaluated, conversation, call)

    def _compare_program(
        self, agent: str, evaluated: ProgramFingerprint, conversation: str, call: IncomingCall
    ) -> None:
        """Raise an alarm if the program differs from the evaluated one. Never raises an exception."""
        requested = call.pending.requested
        try:
            path = str(requested.agent)
            for change in self._watches.add(agent, evaluated, path, conversation, requested.request):
                logger.error("the program has changed since the candidate of %s was evaluated: %s", agent, change)
                self._alarm()
        except Exception:
            logger.exception("a call of %s was not compared with the evaluation", agent)

    async def _chosen(self, agent: str, conversation: str, policies: AgentPolicies, served: Mapping[str, Any]) -> str:
        """Return the policy that a conversation is assigned to. Its first call assigns it."""
        key = (agent, conversation)
        known = self._assigned.get(key)
        if known is not None:
            self._assigned.move_to_end(key)
            return known
        current = policies.current
        in_canary = current.stage == "canary" and current.candidate in served
        candidate = str(current.candidate)
        chosen = candidate if in_canary and draw(agent, candidate, conversation) < current.share else current.stable
        assignment = Assignment(
            agent=agent, attempt_id=conversation, policy=chosen, number=current.number, at_ns=time.time_ns()
        )
        self._assigned[key] = policy = await asyncio.to_thread(self._assign, assignment)
        if len(self._assigned) > _REMEMBERED:
            self._assigned.popitem(last=False)
        return policy

    def _assign(self, assignment: Assignment) -> str:
        """Write an assignment. Return its policy, or that of the assignment that already existed."""
        if self._store.add_assignments([assignment]):
            return assignment.policy
        found = self._store.page(Assignment, Where(attempt_ids=[assignment.attempt_id])).records
        return next((one.policy for one in found if one.agent == assignment.agent), assignment.policy)


def _is_copied(current: Deployment, conversation: str) -> bool:
    return current.stage == "shadow" and draw(current.agent, str(current.candidate), conversation) < current.share


def _stable(policies: AgentPolicies, served: Mapping[str, Any]) -> str:
    """Return the stable policy or, while its adapter is not loaded, an earlier one.

    Raises:
        Refusal: none of them is served here.
    """
    current = policies.current
    for name in (current.stable, *policies.retired):
        if name in served:
            return name
    message = (
        f"the stable policy {current.stable!r} of {current.agent} is not served here. Give the server an --upstream of"
        " that name, or see its log for why the adapter was not loaded."
    )
    raise Refusal(503, message, "server_error", "policy_not_loaded", {"retry-after": "1"})


def conversation_of(call: IncomingCall) -> str:
    """Return the name of the conversation that a call belongs to.

    Raises:
        Refusal: the header is too long.
    """
    requested = call.pending.requested
    if requested.grant.attempt_id is not None:
        return requested.grant.attempt_id
    named = call.headers.get(CONVERSATION_HEADER, b"").decode("latin-1").strip()
    if len(named) > _LONGEST:
        raise bad_request(f"x-lightning-conversation has {len(named)} characters; at most {_LONGEST} are taken")
    return f"conversation:{named}" if named else f"messages:{beginning_of(requested.request)}"


def talk_of(call: Call) -> str:
    """Return the conversation of a recorded call, under the name that its rewards use."""
    return str(call.attempt_id or call.sampling.get(CONVERSATION) or f"messages:{beginning_of(call.request)}")


def beginning_of(request: Mapping[str, Any]) -> str:
    """Return a hash of the messages up to the first user message, which stay the same within a conversation."""
    messages = request.get("messages")
    found = messages if isinstance(messages, list) else [request.get("prompt")]
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in found]
    first = roles.index("user") + 1 if "user" in roles else len(found)
    return hashlib.sha256(dumps(found[:first])).hexdigest()[:32]


def draw(agent: str, candidate: str, conversation: str) -> float:
    """Return a number in [0, 1), determined by the arguments.

    A larger share keeps all conversations of a smaller one.
    """
    digest = hashlib.sha256("\0".join((agent, candidate, conversation)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
