"""The policy of each agent: `writer=lora,rewriter=lora:team,checker=base`, parsed once.

A value is `lora` (the agent's own adapter, named after it), `lora:NAME` (an adapter with this name; agents that name
the same one share it), `fixed` or `fixed:NAME` (an adapter of the checkpoint that training starts from, served and
never trained) or `base` (the model without adapters, also served and never trained). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import is_glob, selects

BASE: Final = "base"  # the name under which the starting model is served, and its value as a policy
SHARED: Final = "shared"  # the adapter of trained agents without a policy of their own
DEFAULT_RANK: Final = 16
ADAPTERS_NAME: Final = "adapters.json"  # in a checkpoint of several adapters: their names, and their model
_LORA: Final = "lora"
SHARED_ADAPTER: Final = f"{_LORA}:{SHARED}"
_FIXED: Final = "fixed"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies by agent.

    Attributes:
        by_agent: policy of each agent name, path or glob; exact ones take precedence over globs, these in the given
            order.
        fixed: names of the adapters that are not trained.
    """

    by_agent: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    def of(self, agent: str | None) -> str | None:
        """Return the policy of the agent with this path; None if it has no policy, or no name."""
        name = most_specific(self.by_agent, agent)
        return None if name is None else self.by_agent[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, in the order of their first mention."""
        return tuple(dict.fromkeys(policy for policy in self.by_agent.values() if policy != BASE))

    @property
    def trained(self) -> tuple[str, ...]:
        """Names and globs of the agents whose adapter is trained."""
        return tuple(agent for agent, policy in self.by_agent.items() if not self.is_frozen(policy))

    def is_frozen(self, policy: str) -> bool:
        """Whether training leaves a policy unchanged: the starting model next to adapters, and adapters of `fixed`."""
        return policy in self.fixed or (policy == BASE and BASE in self.by_agent.values())


def most_specific(names: Collection[str], agent: str | None) -> str | None:
    """Return which of some names, paths and globs is for the agent with this path; None if none of them is.

    Exact ones take precedence over globs, these in the given order.
    """
    if agent in names:
        return agent
    meant = [name for name in names if selects((name,), agent)]
    exact = [name for name in meant if not is_glob(name)]
    return max(exact, key=len) if exact else next(iter(meant), None)  # the longest path is the most specific


def parse(values: Mapping[str, str]) -> Policies:
    """Parse the values of `--policy`.

    Raises:
        ConfigError: a value has none of the forms above, a name is invalid, two agents' own adapters would have the
            same name, or an adapter would be both trained and fixed.
    """
    owners: dict[str, str] = {}  # the agent that an adapter is named after, by adapter
    by_agent: dict[str, str] = {}
    kinds: dict[str, set[str]] = {_LORA: set(), _FIXED: set()}
    for agent, value in sorted(values.items(), key=lambda item: is_glob(item[0])):
        kind, colon, name = value.partition(":")
        if value == BASE:
            by_agent[agent] = BASE
            continue
        if kind not in kinds or (colon and not name):
            raise ConfigError(
                f"policy {agent}={value}: write {agent}=lora, {agent}=lora:NAME to share, {agent}=fixed or"
                f" {agent}=base."
            )
        if not name:
            name = _own_name(agent)
            if name in owners:
                raise ConfigError(f"the adapters of {owners[name]} and {agent} would both be named {name}. {_NAME_IT}")
            owners[name] = agent
        _check_name(agent, name)
        by_agent[agent] = name
        kinds[kind].add(name)
    for name in sorted(kinds[_LORA] & kinds[_FIXED]):
        raise ConfigError(f"the adapter {name} can't be both trained and fixed. {_NAME_IT}")
    return Policies(by_agent, frozenset(kinds[_FIXED]))


_NAME_IT: Final = "Give one a name: AGENT=lora:NAME."


def complete(values: Mapping[str, str], agents: Sequence[str] | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """Combine `--policy` and `--agents`.

    Args:
        values: policies as given; not empty.
        agents: names and globs of the agents to train; None: those with a trained adapter.

    Returns:
        The policies, with the shared adapter for trained agents that name none; and the agents to train.

    Raises:
        ConfigError: see `parse`; or a trained policy belongs to an agent that is not to be trained, an agent to train
            has a policy that is not trained, or no policy is trained.
    """
    known = parse(values)
    trained = known.trained
    if agents is None:
        agents = trained
    if not agents:
        raise ConfigError("no policy is trained: give at least one agent the policy lora, or name it in agents.")
    for agent in trained:
        if agent not in agents:
            raise ConfigError(f"policy {agent}={values[agent]} has no effect: {agent} is not in agents. Add it there.")
    for agent in agents:
        if agent in values and agent not in trained:
            raise ConfigError(f"{agent} is in agents, but its policy {values[agent]} is not trained. Give it lora.")
    filled = {agent: values.get(agent, SHARED_ADAPTER) for agent in agents}
    return {**filled, **{agent: value for agent, value in values.items() if agent not in filled}}, tuple(agents)


def read_weights(text: str) -> dict[str, float]:
    """Parse `writer=2.0,checker=1`.

    Raises:
        ConfigError: a part is not AGENT=NUMBER.
    """
    found = {}
    for part in text.split(","):
        agent, _, weight = part.partition("=")
        try:
            found[agent.strip()] = float(weight)
        except ValueError:
            raise ConfigError(
                f"agent_weight = {text!r}: {part!r} is not AGENT=NUMBER. Write writer=2.0,checker=1, or equal."
            ) from None
    return found


def read_counts(text: str) -> dict[str, int]:
    """Parse `writer=5,checker=3`.

    Raises:
        ConfigError: a part is not AGENT=K.
    """
    found = {}
    for part in text.split(","):
        agent, _, count = part.rpartition("=")
        if not (agent.strip() and count.strip().isdecimal()):
            raise ConfigError(
                f"opponents = {text!r}: {part!r} is not AGENT=K, such as checker=5 for 5 of its past weights."
            )
        found[agent.strip()] = int(count)
    return found


def read_text(texts: str | Iterable[str]) -> dict[str, str]:
    """Parse `a=lora,b=lora:team`, in one text or several.

    Raises:
        ConfigError: a part is not AGENT=POLICY, or an agent is listed twice.
    """
    found: dict[str, str] = {}
    for part in ",".join([texts] if isinstance(texts, str) else texts).split(","):
        if not part.strip():
            continue
        agent, equals, value = (piece.strip() for piece in part.rpartition("="))
        if not (agent and equals and value):
            raise ConfigError(
                f"policy {part!r}: write AGENT=lora, AGENT=lora:NAME, AGENT=fixed or AGENT=base, with commas between."
            )
        if agent in found:
            raise ConfigError(f"policy: {agent} has two policies. Give it one.")
        found[agent] = value
    return found


def _own_name(agent: str) -> str:
    """Return the name of an agent's own adapter; folder and model names allow fewer characters than agent names."""
    if is_glob(agent):
        raise ConfigError(f"policy {agent}=lora: several agents share it, so it needs a name: {agent}=lora:NAME.")
    return re.sub(r"[^A-Za-z0-9_-]+", "_", agent).strip("_-")


def _check_name(agent: str, name: str) -> None:
    if not _NAME.fullmatch(name) or name in {BASE, "default"}:
        raise ConfigError(
            f"policy of {agent}: an adapter can't be named {name!r}. Use letters, digits, - and _; not base or default."
        )
