"""Answers copies of live calls with a candidate: a bounded queue, which counts the copies that it drops.

Tools are not executed. If the candidate calls the same tools as the stable policy, with the same arguments, the
recorded results are used, and the next copy continues with the candidate's own message. If it calls other tools, there
is no result, so the rest of that turn is not copied.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from starlette.types import Message

from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment, copy_id
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.calls.incoming import IncomingCall
from lightning_trainer.gateway.calls.models import ServedModel
from lightning_trainer.gateway.calls.response import ResponseSender
from lightning_trainer.gateway.request.pending import PendingCall, RequestedCall, RoutedCall, SampledCall
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.surfaces.chat import ChatSurface
from lightning_trainer.kits.deploy.routing import MARK
from lightning_trainer.kits.deploy.shadow.comparison import ShadowRules, agreement, measure
from lightning_trainer.kits.deploy.shadow.judging import AnswerJudge

logger = logging.getLogger(__name__)
MOST_WAITING: Final = 256  # waiting and running copies; further ones are dropped and counted
AT_ONCE: Final = 4  # copies that are answered at once
_LONGEST_S: Final = 300.0  # longest time of an answer
_REMEMBERED: Final = 10_000  # answers with tool calls
_NOBODY: Final = Grant("caller", None, None, None, 0.0)  # a copy belongs to no attempt and counts for no key
_ToolCallIds: TypeAlias = tuple[str, tuple[str, ...]]  # the conversation, and the ids of a message's calls


@dataclass(frozen=True, slots=True)
class LiveCall:
    """An answered live call to copy to the candidate.

    Attributes:
        deployment: the shadow.
        conversation: the conversation that it belongs to.
        requested: request of the user's program.
        answer: record of the stable policy's answer.
        usage: its tokens as counted by the upstream.
        candidate: the model that answers the copy.
        routing: the routing at the time of the request.
        mask: masks the record of the candidate's answer before it is stored.
    """

    deployment: Deployment
    conversation: str
    requested: RequestedCall
    answer: Call
    usage: Mapping[str, Any]
    candidate: ServedModel
    routing: Routing
    mask: Callable[[Call], Call]

    @property
    def key(self) -> tuple[str, str]:
        """The agent and the conversation."""
        return self.deployment.agent, self.conversation


class ShadowCopies:
    """Lets candidates answer copies of live calls, and stores the results.

    Args:
        store: stores the records.
        count: called with the result of each copy: ``answered``, ``failed``, ``dropped``, ``off path``.
        most: largest number of waiting copies.
    """

    def __init__(
        self, store: Store, *, count: Callable[[str], None] = lambda _: None, most: int = MOST_WAITING
    ) -> None:
        self._store = store
        self._count = count
        self._most = most
        self._places = asyncio.Semaphore(AT_ONCE)
        self._judge = AnswerJudge()
        self._tasks: dict[asyncio.Task[None], tuple[str, str]] = {}
        self._last: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._uncopied: Counter[tuple[str, int, str]] = Counter()  # by agent, deployment and reason
        self._answers: OrderedDict[_ToolCallIds, Mapping[str, Any] | None] = OrderedDict()  # None: not the same calls

    def offer(self, call: IncomingCall, deployment: Deployment, conversation: str) -> None:
        """Accept a copy of a live call that was answered. Never waits and never raises."""
        try:
            candidate = call.models.by_name().get(str(deployment.candidate))
            if candidate is None:  # its adapter is not loaded yet; see the server's log
                return
            if len(self._tasks) >= self._most:
                self._pass_over(deployment, "dropped")
                return
            pending = call.pending
            if not call.record.is_stored(pending):  # the copy is deleted with the record of its call
                return
            answer, usage = pending.finish(), pending.sampled.usage
            given = (conversation, pending.requested, answer, usage, candidate, call.routing, call.record.mask)
            self._begin(LiveCall(deployment, *given))
        except Exception:
            logger.exception("a live call of %s was not copied", deployment.agent)

    def _pass_over(self, deployment: Deployment, why: str) -> None:
        self._uncopied[deployment.agent, deployment.number, why] += 1
        self._count(why)

    def _begin(self, live: LiveCall) -> None:
        task = asyncio.get_running_loop().create_task(self._follow(live, self._last.get(live.key)))
        self._tasks[task] = live.key
        self._last[live.key] = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        key = self._tasks.pop(task)
        if self._last.get(key) is task:
            del self._last[key]

    async def close(self) -> None:
        """Drop the waiting copies: the server stops."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._judge.close()

    async def _follow(self, live: LiveCall, before: asyncio.Task[None] | None) -> None:
        """Answer a copy after the previous one of its conversation, whose answer it may contain."""
        if before is not None:
            await asyncio.wait([before])
        async with self._places:
            try:
                await self._copy(live)
            except Exception:
                logger.exception("the copy of a call of %s failed", live.deployment.agent)

    async def _copy(self, live: LiveCall) -> None:
        request = self._request_of(live)
        if request is None:
            self._pass_over(live.deployment, "off path")
            return
        call, sampled = await _answer(live, request)
        kind, agrees = agreement(live.answer, call)
        self._remember(live, call if agrees else None)
        rules = ShadowRules.of(live.deployment.details[SHADOW])
        mark: dict[str, Any] = {
            "agent": live.deployment.agent,
            "conversation": live.conversation,
            "of": live.answer.response_id,
            "kind": kind,
            "agrees": agrees,
            "stable": measure(live.answer, live.usage, rules.rules),
            "candidate": measure(call, sampled.usage, rules.rules),
        }
        if rules.judge is not None and not agrees and call.error is None:
            stable = replace(live.answer, request=request)
            mark["judge"] = await asyncio.to_thread(self._judge.compare, rules.judge, stable, call)
        await self._keep(live, call, mark)
        self._count("answered" if call.error is None else "failed")

    async def _keep(self, live: LiveCall, call: Call, mark: dict[str, Any]) -> None:
        """Write the record without the request, which the live call has. It is deleted with that call."""
        name, number = live.deployment.agent, live.deployment.number
        uncopied = {why: self._uncopied.pop((name, number, why), 0) for why in ("dropped", "off path")}
        marks = {MARK: number, SHADOW: {**mark, **uncopied}}
        masked = live.mask(call)  # with its request, which the tokens of the prompt contain
        sampling = {**masked.sampling, **marks}
        kept = replace(masked, call_id=copy_id(live.answer.call_id), origin=SHADOW, request={}, sampling=sampling)
        try:
            await asyncio.to_thread(self._store.add_calls, [kept])
        except BaseException:
            self._uncopied.update({(name, number, why): count for why, count in uncopied.items()})
            raise

    def _request_of(self, live: LiveCall) -> Mapping[str, Any] | None:
        """Return the candidate's request, with its own messages where it called the same tools.

        None: it called other tools in this turn, which were not run.
        """
        plain = {"stream", "stream_options"}
        request = {name: value for name, value in live.requested.request.items() if name not in plain}
        messages = request.get("messages")
        if not isinstance(messages, list):
            return request
        users = [place for place, message in enumerate(messages) if _role(message) == "user"]
        own = list(messages)
        for place, message in enumerate(messages):
            ids = _call_ids(message)
            if not ids or (live.conversation, ids) not in self._answers:
                continue
            answered = self._answers[live.conversation, ids]
            if answered is not None:
                own[place] = {**answered, "tool_calls": message["tool_calls"]}
            elif not users or place > users[-1]:
                return None
        return {**request, "messages": own}

    def _remember(self, live: LiveCall, call: Call | None) -> None:
        """Record the candidate's message if the stable policy called tools.

        `call` is None if the candidate called others.
        """
        message = live.answer.choices[0].message if live.answer.choices else {}
        if not (ids := _call_ids(message)):
            return
        said = None if call is None else {"role": "assistant", **call.choices[0].message}
        self._answers[live.conversation, ids] = said
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)


async def _answer(live: LiveCall, request: Mapping[str, Any]) -> tuple[Call, SampledCall]:
    """Get the candidate's answer, and return its record, which contains the error if it failed."""
    requested = replace(
        live.requested,
        request=request,
        grant=_NOBODY,
        trace_id=None,
        span_id=None,
        response_id=f"shadow-{os.urandom(12).hex()}",
        start_ns=time.time_ns(),
    )
    pending = PendingCall(requested, RoutedCall(str(live.deployment.candidate)))
    sender = ResponseSender(_send_nowhere, ChatSurface().begin(request, None), pending)
    error = None
    try:
        async with asyncio.timeout(_LONGEST_S):
            await live.candidate.answer(pending, sender, _keep_later, live.routing)
    except TimeoutError:
        error = f"no answer within {_LONGEST_S:g} s"
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is the candidate's failure and goes on record
        error = str(failure) or type(failure).__name__
    return pending.finish(error), pending.sampled


async def _send_nowhere(message: Message) -> None:
    """Discard an answer: no user gets it."""


async def _keep_later(pending: PendingCall) -> None:
    """Store nothing yet: the record is written with the comparison."""


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _call_ids(message: Any) -> tuple[str, ...]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return tuple(str(call.get("id")) for call in calls or () if isinstance(call, Mapping))
