"""The fingerprint of a program: what it gives each agent over many calls, used to detect changes.

Values that change by themselves (dates, users' names, retrieved text) are not changes: only what all calls share
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_trainer.session.programs import Json, digest, first_user_text, system_prompt, tools_of
from lightning_trainer.session.prompt_lines import (
    SharedLines,
    describe_difference,
    fit,
    lines_of,
    share,
    without_moments,
)

_DISTINCT: Final = 10  # distinct first user messages that make the lines shared by all the program's
_REMEMBERED: Final = 10_000  # distinct calls that are remembered, so that repeated ones are not read again


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFingerprint:
    """What all calls of an agent have in common.

    Attributes:
        conversations: their number.
        prompt: lines that its system prompts share, None where they differ; without a system prompt, those of the
            users' first messages.
        system: whether its calls have a system prompt; None: some do.
        tools: digests of the description and of the parameters of each tool, by name; None if it varies.
        always: tools that every call offers.
    """

    conversations: int
    prompt: SharedLines
    system: bool | None
    tools: Mapping[str, tuple[str | None, str | None]]
    always: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as JSON."""
        return {
            "conversations": self.conversations,
            "prompt": list(self.prompt),
            "system": self.system,
            "tools": {name: list(digests) for name, digests in sorted(self.tools.items())},
            "always": sorted(self.always),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AgentFingerprint:
        """Read the result of `to_json`."""
        tools = {name: (digests[0], digests[1]) for name, digests in values["tools"].items()}
        return cls(
            conversations=values["conversations"],
            prompt=tuple(values["prompt"]),
            system=values["system"],
            tools=tools,
            always=frozenset(values["always"]),
        )


@dataclass(slots=True)
class AgentCalls:
    """Accumulator for the calls of one agent."""

    conversations: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    _prompt: SharedLines | None = None
    _first: SharedLines | None = None  # of users' first messages, if there is no system prompt
    _firsts: set[str] = field(default_factory=set)
    _tools: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    _always: frozenset[str] | None = None

    def add(self, conversation: str, request: Mapping[str, Json]) -> None:
        """Add a call."""
        self.conversations.add(conversation)
        prompt, tools = system_prompt(request), list(tools_of(request))
        first = "" if prompt else first_user_text(request)
        key = digest(repr((prompt, first, tools)))
        if key in self._seen:
            return
        if len(self._seen) < _REMEMBERED:
            self._seen.add(key)
        if prompt:
            lines = lines_of(prompt)
            self._prompt = lines if self._prompt is None else share(self._prompt, lines)
        else:
            lines = lines_of(first)
            self._first = lines if self._first is None else share(self._first, lines)
            self._firsts.add(digest(first))
        self._add_tools(tools)

    def _add_tools(self, tools: list[tuple[str, str, str]]) -> None:
        for name, description, parameters in tools:
            digests = digest(without_moments(description)), digest(without_moments(parameters))
            known = self._tools.get(name, digests)
            self._tools[name] = (
                digests[0] if known[0] == digests[0] else None,
                digests[1] if known[1] == digests[1] else None,
            )
        names = frozenset(name for name, _, _ in tools)
        self._always = names if self._always is None else self._always & names

    def fingerprint(self) -> AgentFingerprint:
        """Return what the calls have in common."""
        return AgentFingerprint(
            conversations=len(self.conversations),
            prompt=self._shared(),
            system=None if self._prompt is not None and self._first is not None else self._prompt is not None,
            tools=dict(self._tools),
            always=self._always or frozenset(),
        )

    def _shared(self) -> SharedLines:
        if self._prompt is not None:
            return self._prompt if self._first is None else (None,)  # only some calls have a system prompt
        return self._first if self._first is not None and len(self._firsts) >= _DISTINCT else (None,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFingerprint:
    """What a program gives its agents.

    Attributes:
        agents: fingerprints by the agent's path.
        always: paths of the agents that call their model in every conversation.
    """

    agents: Mapping[str, AgentFingerprint]
    always: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as JSON."""
        agents = {path: agent.to_json() for path, agent in sorted(self.agents.items())}
        return {"agents": agents, "always": sorted(self.always)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProgramFingerprint:
        """Read the result of `to_json`."""
        agents = {path: AgentFingerprint.from_json(agent) for path, agent in values["agents"].items()}
        return cls(agents=agents, always=frozenset(values["always"]))

    def changes(self, path: str, served: AgentFingerprint) -> list[str]:
        """Return how a served agent differs from the evaluated one; empty if it does not.

        Args:
            path: path of the agent.
            served: fingerprint of its calls in production.
        """
        evaluated = self.agents.get(path)
        if evaluated is None:
            return [f"agent {path} was not in the evaluation, which had {', '.join(sorted(self.agents)) or 'none'}"]
        return [f"agent {path}: {change}" for change in _agent_changes(evaluated, served)]


def _agent_changes(evaluated: AgentFingerprint, served: AgentFingerprint) -> Iterator[str]:
    if evaluated.system and served.system is False:
        yield "its system prompt was removed"
    elif served.system and evaluated.system is False:
        yield "it has a system prompt, but had none in the evaluation"
    elif not fit(evaluated.prompt, served.prompt):
        yield f"its prompt changed: {describe_difference(evaluated.prompt, served.prompt)}"
    for name in sorted(evaluated.tools.keys() & served.tools.keys()):
        pairs = zip(("description", "parameters"), evaluated.tools[name], served.tools[name], strict=True)
        for part, old, new in pairs:
            if old is not None and new is not None and old != new:
                yield f"the {part} of its tool {name} changed: evaluated {old}, served {new}"
    for name in sorted(served.always - evaluated.tools.keys()):
        yield f"its tool {name} was not in the evaluation"
    for name in sorted(evaluated.always - served.tools.keys()):
        yield f"its tool {name} was in every evaluated call and is not served"
