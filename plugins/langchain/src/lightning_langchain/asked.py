"""Whose tool call is it? The agent's whose model asked for it, also where several agents share one node of tools."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_spans.context import current_agent

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult

    from lightning_langchain.runs import Run

_CONVERSATIONS: Final = 1024  # that may wait for somebody's approval at once; the oldest are forgotten
_CALLS: Final = 64  # and of one conversation


class Asked(NamedTuple):
    """A tool call that a model asked for."""

    call_id: str
    agent: str | None
    name: str
    arguments: Mapping[str, Any]


class Waiting:
    """What was asked for in conversations that were interrupted before the tool was called, by LangGraph's thread."""

    def __init__(self) -> None:
        self._by_thread: OrderedDict[str, list[Asked]] = OrderedDict()

    def begin(self, root: Run) -> None:
        """Give a root run what an earlier one of its conversation left."""
        if self._by_thread and (thread := root.metadata.get("thread_id")) is not None:
            root.asked.extend(self._by_thread.pop(str(thread), ()))

    def end(self, root: Run) -> None:
        """Keep what is left of a root run that has ended."""
        if root.asked and (thread := root.metadata.get("thread_id")) is not None:
            self._by_thread[str(thread)] = root.asked[-_CALLS:]  # some are never made: those that are an answer's form
            if len(self._by_thread) > _CONVERSATIONS:
                self._by_thread.popitem(last=False)


def remember(run: Run, response: LLMResult) -> None:
    """Keep what the answer of a model asks for."""
    messages = [getattr(generation, "message", None) for row in response.generations for generation in row]
    for call in [call for message in messages for call in getattr(message, "tool_calls", None) or ()]:
        if call_id := call.get("id"):
            run.asked.append(Asked(call_id, current_agent(run.context), call["name"], call["args"]))


def who_asked(run: Run, call_id: str | None, arguments: Mapping[str, Any] | None, agent: str | None) -> Asked | None:
    """Find who asked for the tool call that a run makes, and take it out; None when no model of its tree did.

    By id, or by name and arguments where the framework does not tell the id (langchain-core before 1.0). Where several
    asked for the same, and ids are unique only within a conversation, it is the agent's that is at work here.
    """
    if call_id is None:
        same = [known for known in list(run.asked) if (known.name, known.arguments) == (run.name, arguments)]
    else:
        same = [known for known in list(run.asked) if known.call_id == call_id]
    for known in sorted(same, key=lambda known: known.agent != agent):
        with suppress(ValueError):  # taken by a tool that began at the same time, in another thread
            run.asked.remove(known)
            return known
    return None
