"""One replay: which request is answered from the record, which is sampled again, and where the program differs.

A request belongs to the oldest unused recorded call of its agent with the same content. Calls that began before the
forked one had ended cannot depend on it: they are answered from the record like those before it. The first request that
is not in the record, before anything was sampled, ends the replay; every later one is rejected with the same reason.

A tool that is marked to have side effects counts as one that is named to be refused. The result of a tool that calls
another agent is returned as a whole like any other, unless a call within it is the forked one, or may be sampled again:
then the tool runs, and what it does is answered one by one.

| a tool call | not in the record, before the fork | in the record, after it | not in the record, after it |
|---|---|---|---| | ``replay`` | ends the replay | recorded result if calls are coupled, else run | run | | ``run``, or
named to be run | run | run | run | | ``refuse``, or named to be refused | ends the replay | recorded result if calls
are coupled, else ends it | ends it |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_spans.schema.agents import selects
from lightning_spans.schema.replays import DIFFERS, ENDED, Replay
from lightning_spans.schema.spans import TOOL_ARGUMENTS, TOOL_SIDE_EFFECTS
from lightning_trainer.gateway.calls.seeds import seed_of
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.equality import same_data
from lightning_trainer.gateway.replay.decisions import Decision, DrawnAnew, FromRecord, Own, ReplayRequest
from lightning_trainer.gateway.replay.record import Record, RecordedCall, RecordedTool, calls_of_agent, unanswerable
from lightning_trainer.gateway.replay.requests import RequestContent, difference, ordinal


class ReplaySession:
    """The state of one running replay. Used by one thread.

    Args:
        replay: its settings.
        record: of the earlier attempt.
        run_seed: of the run; None: sampling is free.

    Attributes:
        ended: why it ended early; None while it follows the record.
        parted: the first request or tool call that was not in the record, if the program continues in spite of it.
    """

    def __init__(self, replay: Replay, record: Record, run_seed: int | None = None) -> None:
        self.replay = replay
        self.record = record
        self.ended: str | None = None
        self.parted: str | None = None
        self._run_seed = run_seed
        self._used: set[RecordedCall | RecordedTool] = set()
        self._decided: dict[tuple[str, str], Decision] = {}
        self._drawn: Counter[tuple[str | None, bytes]] = Counter()
        self._seeded: set[RecordedCall] = set()  # calls whose seeds were used for the calls replacing them
        self._parted = False  # whether anything was sampled
        self._forked = False
        self._fork = self._forked_call()
        self._until_ns = self._fork.ended_ns if self._fork is not None else None

    def _forked_call(self) -> RecordedCall | None:
        if self.replay.call is None:
            return None
        if not 0 <= self.replay.call < len(self.record.calls):
            self.ended = (
                f"attempt {self.record.attempt_id} has {len(self.record.calls)} calls on record, numbered from 0:"
                f" there is no call {self.replay.call}"
            )
            return None
        return self.record.calls[self.replay.call]

    def call(self, request: ReplayRequest) -> Decision:
        """Return how a model call is answered.

        Raises:
            Refusal: the replay has ended, perhaps because of this call.
        """
        self._check()
        if request.span is not None and (known := self._decided.get(request.span)) is not None:
            return known
        decision = self._decide(request)
        if request.span is not None:
            self._decided[request.span] = decision
        return decision

    def _decide(self, request: ReplayRequest) -> Decision:
        found = self._match(request)
        goes_on = self.replay.call is None and self.replay.beyond == "sample"
        if found is None and goes_on and self.parted is None:
            self.parted = self._unlike(request)
        if self.replay.call is None and selects(self.replay.fresh, request.agent):
            if found is not None:
                self._used.add(found)
            return self._anew(request)
        if found is None:
            if self._parted or goes_on:
                return self._anew(request)
            raise self._end(self._unlike(request))
        if found is self._fork:
            self._used.add(found)
            self._forked = self._parted = True
            return self._anew(request, found)
        if self._is_tail(found) and not self.replay.coupled:
            return self._anew(request)
        if found.is_left and (goes_on or self._is_left_late(found)):
            self._used.add(found)
            return self._drawn_by(request)
        why = unanswerable(found)
        if why is not None:
            raise self._end(f"{self._name(found)} can't be replayed: {why}")
        self._used.add(found)
        return FromRecord(found, coupled=self._is_tail(found))

    def _match(self, request: ReplayRequest) -> RecordedCall | None:
        """Return the unused recorded call that matches: one before the fork, the forked one, or one after it."""
        same = [call for call in calls_of_agent(self.record.calls, request.agent) if self._is_same(call, request)]
        free = [call for call in same if call not in self._used]
        exact = [call for call in free if request.agent in call.agents or not call.agents] or free
        return min(exact, key=lambda call: (self._is_tail(call), call is self._fork, call.number), default=None)

    def _is_same(self, call: RecordedCall, request: ReplayRequest) -> bool:
        asked = request.raw if call.raw else request.chat
        return asked is not None and asked.key == call.asked.key

    def _is_tail(self, call: RecordedCall) -> bool:
        """Whether a call may depend on the forked one."""
        return self._until_ns is not None and call is not self._fork and call.node.span.start_ns >= self._until_ns

    def _is_left_late(self, call: RecordedCall) -> bool:
        """Whether a call was cancelled after the forked one had its answer, so that it may be awaited this time."""
        return self._until_ns is not None and call.node.span.end_ns >= self._until_ns

    def _anew(self, request: ReplayRequest, fork: RecordedCall | None = None) -> DrawnAnew | Own:
        self._parted = True
        return self._drawn_by(request, fork)

    def _drawn_by(self, request: ReplayRequest, fork: RecordedCall | None = None) -> DrawnAnew | Own:
        fresh = self.replay.call is None and selects(self.replay.fresh, request.agent)
        model = self.replay.model if fork is not None or fresh else None
        say = self.replay.say if fork is not None else None
        if say is None and model is None and not request.sampled:
            return Own(fork)
        return DrawnAnew(fork, self._seed(request, fork), model, say)

    def _seed(self, request: ReplayRequest, fork: RecordedCall | None) -> int | None:
        """Return the seed for sampling.

        If calls are coupled, a call after the fork that replaces a recorded one, by agent and order, has that one's
        seed: requests with small differences then mostly sample the same.
        """
        if self._run_seed is None:
            return None
        replay, agent = self.replay, request.agent
        if fork is None and replay.coupled and replay.call is not None:
            left = (call for call in calls_of_agent(self.record.calls, agent) if call not in self._used | self._seeded)
            counterpart = next((call for call in left if self._is_tail(call)), None)
            if counterpart is not None:
                self._seeded.add(counterpart)
            recorded = counterpart.node.call if counterpart is not None else None
            seeds = recorded.sampling.get("seeds") if recorded is not None else None
            if isinstance(seeds, list) and seeds and isinstance(seeds[0], int):
                return int(seeds[0])
        asked = request.best.key
        self._drawn[agent, asked] += 1
        name = self.record.rollout_id.rpartition(":")[2]
        number = self._drawn[agent, asked]
        return seed_of(self._run_seed, name, "fork", replay.call, replay.draw, agent, asked.hex(), number)

    def release(self, request: ReplayRequest) -> None:
        """Drop a decision whose call failed before its answer. A retry is decided again."""
        decision = self._decided.pop(request.span, None) if request.span is not None else None
        if isinstance(decision, DrawnAnew) and decision.fork is not None:
            self._used.discard(decision.fork)

    def tool(
        self, agent: str | None, name: str, call_id: str | None, arguments: str, *, side_effects: bool = False
    ) -> RecordedTool | None:
        """Return the recorded tool call whose result is returned; None: the tool must run.

        Args:
            agent: the calling agent.
            name: of the tool.
            call_id: that of the model's request for it, if there is one.
            arguments: JSON text.
            side_effects: whether it is marked to have them.

        Raises:
            Refusal: the replay has ended, perhaps because of this call.
        """
        self._check()
        if self._runs(name, side_effects=side_effects):
            return None
        wanted = same_data(arguments or "{}")
        same = [tool for tool in self.record.tools if tool.name == name and tool.arguments == wanted]
        free = [tool for tool in same if tool not in self._used and not self._is_late(tool)]
        if free:
            best = min(
                free,
                key=lambda tool: (
                    call_id is None or tool.call_id != call_id,
                    tool.agent != agent,
                    tool.start_ns,
                ),
            )
            self._used.add(best)
            return self._given_whole(best, refused=self._is_named(name, side_effects=side_effects))
        if self._refuses(name, side_effects=side_effects):
            raise self._end(f"{self._unlike_tool(agent, name, arguments)}. It must not run again")
        goes_on = self.replay.call is None and self.replay.beyond == "sample"
        if goes_on and self.parted is None:
            self.parted = self._unlike_tool(agent, name, arguments)
        if self._parted or goes_on:
            return None
        raise self._end(self._unlike_tool(agent, name, arguments))

    def _given_whole(self, tool: RecordedTool, *, refused: bool) -> RecordedTool | None:
        """Return a tool whose result covers everything within it; None if an agent within it must be called again.

        Raises:
            Refusal: it would have to run for that, and may not.
        """
        replay, inside = self.replay, [self.record.calls[number] for number in tool.calls]
        goes_on = replay.call is None and (replay.beyond == "sample" or any(map(self._is_fresh, inside)))
        if inside and (goes_on or self._fork in inside):
            if refused:
                raise self._end(
                    f"a call made inside of the tool `{tool.name}` would be sampled again, but it must not run"
                )
            return None
        self._used.update(inside, (self.record.tools[number] for number in tool.tools))
        return tool

    def _is_fresh(self, call: RecordedCall) -> bool:
        return any(selects(self.replay.fresh, agent) for agent in call.agents)

    def _is_late(self, tool: RecordedTool) -> bool:
        """Whether a tool call came after the fork, so that its result is no longer valid."""
        after = self._until_ns is not None and tool.start_ns >= self._until_ns
        return after and self._parted and not self.replay.coupled

    def _runs(self, name: str, *, side_effects: bool) -> bool:
        if selects(self.replay.run_tools, name):
            return True
        return self.replay.tools == "run" and not self._refuses(name, side_effects=side_effects)

    def _refuses(self, name: str, *, side_effects: bool) -> bool:
        return self.replay.tools == "refuse" or self._is_named(name, side_effects=side_effects)

    def _is_named(self, name: str, *, side_effects: bool) -> bool:
        """Whether a tool must never run twice: because of its name, or its mark."""
        if side_effects or selects(self.replay.refuse_tools, name):
            return True
        return any(tool.name == name and tool.marks.get(TOOL_SIDE_EFFECTS) is True for tool in self.record.tools)

    def at_end(self) -> str | None:
        """Return why an ended program was no replay of the record; None if it was."""
        if self.ended is not None:
            return self.ended
        made = sum(isinstance(used, RecordedCall) for used in self._used)
        all_of_them = len(self.record.calls)
        if self._fork is not None and not self._forked:
            return f"the program ended before call {self._fork.number}: it made {made} calls of the {all_of_them}"
        if self.replay.call is None and self.replay.beyond == "end":
            missing = next((call for call in self.record.calls if call not in self._used and not call.is_left), None)
            if missing is None:
                return None
            return f"the program ended without {self._name(missing)}: it made {made} calls of the {all_of_them}"
        return None

    def _check(self) -> None:
        if self.ended is not None:
            raise _refusal(self.ended)

    def _end(self, reason: str) -> Refusal:
        self.ended = reason
        return _refusal(reason)

    def _unlike(self, request: ReplayRequest) -> str:
        """Return how a request that is not in the record differs from the one that it replaces."""
        own = calls_of_agent(self.record.calls, request.agent)
        who = "a call without an agent" if request.agent is None else f"`{request.agent}`"
        if not own:
            known = sorted({name for call in self.record.calls for name in call.agents})
            return f"the record has no call of {who}; it has calls of {', '.join(known) or 'no named agent'}"
        left = [call for call in own if call not in self._used]
        if not left:
            times = "1 call" if len(own) == 1 else f"{len(own)} calls"
            said = request.best.shown[-1] if request.best.shown else ("", "")
            return f"{who} made {times} in the record and this is one more; its last message is {said[0]}: {said[1]!r}"
        nearest = max(left, key=lambda call: (_common(call.asked, self._form(call, request)), -call.number))
        return f"{self._name(nearest)} is another: {difference(nearest.asked, self._form(nearest, request))}"

    @staticmethod
    def _form(call: RecordedCall, request: ReplayRequest) -> RequestContent:
        return request.raw if call.raw else request.best

    def _name(self, call: RecordedCall) -> str:
        own = [each for each in self.record.calls if each.agent == call.agent]
        who = f"`{call.agent}`'s" if call.agent is not None else "the"
        return f"{who} {ordinal(own.index(call))} call (call {call.number})"

    def _unlike_tool(self, agent: str | None, name: str, arguments: str) -> str:
        who = "the program" if agent is None else f"`{agent}`"
        own = [tool for tool in self.record.tools if tool.name == name]
        if not own:
            known = ", ".join(sorted({tool.name for tool in self.record.tools})) or "none"
            return f"{who} called the tool `{name}`, which is not in the record; its tools are: {known}"
        left = [tool for tool in own if tool not in self._used]
        if not left:
            return f"{who} called the tool `{name}` once more than in the record, with {arguments[:200]}"
        return (
            f"{who} called the tool `{name}` with {arguments[:200]}, and the record has"
            f" {str(left[0].marks.get(TOOL_ARGUMENTS))[:200]}"
        )


def _common(recorded: RequestContent, now: RequestContent) -> int:
    """Count the equal messages at the beginning of two requests."""
    count = 0
    for old, new in zip(recorded.lines, now.lines, strict=False):
        if old != new:
            return count
        count += 1
    return count


def _refusal(reason: str) -> Refusal:
    # Clients retry after a 409 unless they are told not to.
    return Refusal(409, f"{ENDED}{reason}", "conflict_error", DIFFERS, {"x-should-retry": "false"})


def side_effects_after(record: Record, call: int, replay: Replay) -> Sequence[str]:
    """Name the tools with side effects that ran after a call and might run again after a fork there."""
    until_ns = record.calls[call].ended_ns
    found = dict.fromkeys(
        tool.name
        for tool in record.tools
        if tool.start_ns >= until_ns
        and not selects(replay.run_tools, tool.name)
        and (tool.marks.get(TOOL_SIDE_EFFECTS) is True or selects(replay.refuse_tools, tool.name))
    )
    return list(found)
