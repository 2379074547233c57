"""The table of deployments: its current state, and one transaction for each transition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_spans.errors import ConfigError
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.protocol import each
from lightning_trainer.kits.deploy.program_watch import evaluated_program
from lightning_trainer.kits.deploy.transitions import Policy, is_tried
from lightning_trainer.session.fingerprint import ProgramFingerprint


@dataclass(frozen=True, slots=True)
class AgentPolicies:
    """The policies in the history of an agent.

    Attributes:
        current: the newest transition.
        retired: earlier stable policies that were never rolled back, newest first: a conversation that started with one
            may end with it.
        evaluated: the program that the newest policy was evaluated with; None if it is unknown.
    """

    current: Deployment
    retired: tuple[str, ...]
    evaluated: ProgramFingerprint | None = None

    def may_answer(self, policy: str) -> bool:
        """Whether a conversation that was assigned to a policy stays with it."""
        current = self.current
        if policy == current.candidate:
            return current.stage == "canary"
        return policy == current.stable or policy in self.retired


def read_histories(store: Store) -> dict[str, list[Deployment]]:
    """Read all transitions by agent, oldest first."""
    histories: defaultdict[str, list[Deployment]] = defaultdict(list)
    for deployment in each(store, Deployment):
        histories[deployment.agent].append(deployment)
    return {agent: sorted(found, key=lambda one: one.number) for agent, found in histories.items()}


def policies_of(history: Sequence[Deployment]) -> AgentPolicies:
    """Return the policies in a history: oldest first, not empty."""
    stable: dict[str, None] = {}
    for one in history:
        if one.stage == "rolled_back" and one.candidate is not None:
            stable.pop(one.candidate, None)
        stable.pop(one.stable, None)
        stable[one.stable] = None  # last, because it is the newest
    current = history[-1]
    retired = tuple(policy for policy in reversed(stable) if policy != current.stable)
    return AgentPolicies(current, retired, evaluated_program(history))


def adapters_to_load(histories: Mapping[str, Sequence[Deployment]], kept: int) -> dict[str, Policy]:
    """Return the adapters that answer calls or may have to soon, by name.

    Args:
        histories: transitions by agent, oldest first.
        kept: number of earlier stable policies of each agent that stay loaded.
    """
    folders = {
        str(one.candidate): Policy(str(one.candidate), one.checkpoint, one.base)
        for history in histories.values()
        for one in history
        if one.checkpoint is not None
    }
    wanted: list[str] = []
    for history in histories.values():
        known = policies_of(history)
        wanted += [known.current.stable, *known.retired[:kept]]
        if is_tried(known.current):
            wanted.append(str(known.current.candidate))
    return {name: folders[name] for name in wanted if name in folders}


def keep(store: Store, deployment: Deployment) -> None:
    """Write a transition, in one transaction.

    Raises:
        ConfigError: another transition was made since the agent's policies were read; nothing is written.
    """
    if store.add_deployments([deployment]):
        return
    known = _of(each(store, Deployment), deployment)
    if known != deployment:  # equal: the response to the first request was lost, and this is a retry
        what = "another transition" if known is None else f"{known.stage}, by {known.actor or 'somebody'}"
        raise ConfigError(
            f"{deployment.agent} was changed meanwhile ({what}). Look at `lightning-rl deploy status` and try again."
        )


def _of(deployments: Iterable[Deployment], wanted: Deployment) -> Deployment | None:
    key = (wanted.agent, wanted.number)
    return next((one for one in deployments if (one.agent, one.number) == key), None)
