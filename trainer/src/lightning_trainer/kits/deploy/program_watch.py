"""Compares the calls of a program in production with the fingerprint from its evaluation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightning_spans.schema.agents import selects
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.transitions import is_tried
from lightning_trainer.session.fingerprint import AgentCalls, ProgramFingerprint

PROGRAM: Final = "program"  # in the details of the row that names a candidate
WINDOW: Final = 20  # conversations that are compared together: fewer may all come from one user or one minute
_REST_S: Final = 30.0  # pause of a server between two windows, which limits the cost for its calls


def named_row(history: Sequence[Deployment]) -> Deployment | None:
    """Return the row that named the policy whose evaluation counts: the candidate, or the last promoted policy."""
    current = history[-1] if history else None
    if current is None or not (is_tried(current) or current.stage == "stable"):
        return None
    policy = current.candidate if is_tried(current) else current.stable
    return next((one for one in reversed(history) if one.stage == "candidate" and one.candidate == policy), None)


def evaluated_program(history: Sequence[Deployment]) -> ProgramFingerprint | None:
    """Return the program that the agent's newest policy was evaluated with; None if it is unknown."""
    named = named_row(history)
    found = None if named is None else named.details.get(PROGRAM)
    return ProgramFingerprint.from_json(found) if isinstance(found, Mapping) else None


class ProgramWatch:
    """Detects how a program differs from the evaluated one, as soon as there are enough conversations.

    The calls of each agent are compared in windows of `WINDOW` conversations, so that a change in the middle of a
    canary is also detected.

    Args:
        evaluated: fingerprint of the program at its evaluation.
        rest_s: seconds without work after each window.
        clock: returns the time in seconds.
    """

    def __init__(
        self, evaluated: ProgramFingerprint, *, rest_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.changes: dict[str, None] = {}  # in the order in which they were detected
        self._evaluated = evaluated
        self._rest_s = rest_s
        self._clock = clock
        self._windows: defaultdict[str, AgentCalls] = defaultdict(AgentCalls)
        self._next_s: dict[str, float] = {}

    def add(self, path: str, conversation: str, request: Mapping[str, Any]) -> list[str]:
        """Add a call, and return the newly detected changes."""
        known = self._known_as(path)
        if self._clock() < self._next_s.get(known, 0.0):
            return []
        window = self._windows[known]
        window.add(conversation, request)
        if len(window.conversations) < WINDOW:
            return []
        del self._windows[known]
        self._next_s[known] = self._clock() + self._rest_s
        found = [
            change for change in self._evaluated.changes(known, window.fingerprint()) if change not in self.changes
        ]
        self.changes |= dict.fromkeys(found)
        return found

    def _known_as(self, path: str) -> str:
        """Return an agent's path in the evaluation. A program that is not attached sends only the agent's name."""
        agents = self._evaluated.agents
        if path in agents or "/" in path:
            return path
        named = [one for one in agents if selects((path,), one)]
        return named[0] if len(named) == 1 else path


class ProgramWatches:
    """The program watches of a server, by agent."""

    def __init__(self) -> None:
        self._watches: dict[str, tuple[ProgramFingerprint, ProgramWatch]] = {}

    def add(
        self, agent: str, evaluated: ProgramFingerprint, path: str, conversation: str, request: Mapping[str, Any]
    ) -> list[str]:
        """Add a call of a deployed agent, and return the newly detected changes."""
        known = self._watches.get(agent)
        if known is None or known[0] != evaluated:
            known = self._watches[agent] = evaluated, ProgramWatch(evaluated, rest_s=_REST_S)
        return known[1].add(path, conversation, request)
