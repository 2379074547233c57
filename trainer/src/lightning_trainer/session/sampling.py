"""How the calls of a program's agents are sampled. Only this module turns options into a `Routing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from lightning_spans.schema.agents import is_glob
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.naming import parse_rules

if TYPE_CHECKING:
    from lightning_trainer.session.answers import AnswerSource

UNKNOWN_POLICY: Final = "policy"  # requested by calls of agents without a policy, if agents have their own: rejected
UNNAMED: Final = "agent"  # name of the only agent of a command that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How calls are sampled: with the same options, every command samples the same way.

    Attributes:
        agents: names or globs of the agents that the user selected; None: all that have a name.
        answered: names or globs of the agents whose calls the model answers; None: `agents`.
        temperature: set on all calls; None: that of the request.
        plain: whether top_p, top_k, min_p and penalties of requests are ignored, and recorded.
        max_tokens: maximum tokens of an answer if the request sets no limit.
        seed: sampling seed; None: 0 for weights that are loaded here, and none for servers.
        name_by: rules that name the agents of calls; see `naming`.
        prompts: system prompts that replace those of agents, by rollout.
    """

    agents: tuple[str, ...] | None = None
    answered: tuple[str, ...] | None = None
    temperature: float | None = None
    plain: bool = False
    max_tokens: int | None = None
    seed: int | None = None
    name_by: tuple[str, ...] = ()
    prompts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject an invalid rule before anything is started."""
        parse_rules(self.name_by)

    def routing(self, answers: AnswerSource, command: str | None) -> Routing:
        """Return which calls the model answers, and how they are sampled.

        Args:
            answers: the model; without one, no call is routed to it.
            command: the program, if it is a command.
        """
        own = answers.policies
        selected = self.agents or ("*",) if self.answered is None else self.answered
        return Routing(
            agents=() if answers.model is None else tuple(own.by_agent) or selected,
            model=UNKNOWN_POLICY if answers.model is None or own.by_agent else answers.model,
            policies=own,
            seed=0 if self.seed is None and answers.engines else self.seed,
            temperature=self.temperature,
            plain=self.plain,
            max_tokens=self.max_tokens,
            unnamed=default_agent_name(command, self.agents, self.name_by),
            name_by=parse_rules(self.name_by),
            prompts=self.prompts,
        )


class SamplingFields(Protocol):
    """Sampling options that the configurations of `train`, `eval` and `prompts` share."""

    @property
    def agents(self) -> tuple[str, ...] | None: ...  # noqa: D102
    @property
    def temperature(self) -> float | None: ...  # noqa: D102
    @property
    def sampling(self) -> Literal["plain", "asked"]: ...  # noqa: D102
    @property
    def max_tokens(self) -> int | None: ...  # noqa: D102
    @property
    def seed(self) -> int | None: ...  # noqa: D102
    @property
    def name_by(self) -> tuple[str, ...]: ...  # noqa: D102


def sampling_of(config: SamplingFields) -> SamplingOptions:
    """Return the sampling options of a configuration."""
    return SamplingOptions(
        agents=config.agents,
        temperature=config.temperature,
        plain=config.sampling == "plain",
        max_tokens=config.max_tokens,
        seed=config.seed,
        name_by=config.name_by,
    )


def default_agent_name(command: str | None, agents: Sequence[str] | None, name_by: Sequence[object] = ()) -> str | None:
    """Return the agent name for a command's calls that nothing names: the only one selected, or `agent`.

    Args:
        command: the agent, if it is a command.
        agents: those selected; None: all.
        name_by: rules that name other agents, so that the only one selected may be one of those.
    """
    if command is None:
        return None
    if agents is None or name_by:
        return UNNAMED
    return agents[0] if len(agents) == 1 and not is_glob(agents[0]) else None
