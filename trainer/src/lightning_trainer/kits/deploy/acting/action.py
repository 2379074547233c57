"""An action on a deployment, with every safeguard of the commands and none of their overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from lightning_spans.errors import ConfigError
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.acting.comparisons import compare_in_canary, compare_in_shadow
from lightning_trainer.kits.deploy.promotion import weigh_promotion
from lightning_trainer.kits.deploy.transitions import Note, promote, roll_back

_LONGEST: Final = 1000  # characters of a reason


class ActionBody(BaseModel):
    """The request body of a transition.

    Attributes:
        agent: whose policy changes.
        action: the transition.
        number: number of the agent's newest transition that the person has seen.
        reason: for the history.
        share: of the conversations, for a shadow or a canary.
        outcomes: sources of the rewards that count, for the first canary; []: all.
        guards: guardrails with their bounds, likewise.
        wait_days: age from which a conversation counts, likewise.
    """

    model_config = ConfigDict(extra="forbid")

    agent: str
    action: Literal["shadow", "canary", "promote", "rollback"]
    number: int
    reason: str = Field(default="", max_length=_LONGEST)
    share: float | None = None
    outcomes: tuple[str, ...] = ()
    guards: dict[str, float] = Field(default_factory=dict)
    wait_days: float = Field(default=0.0, ge=0.0)


def make_transition(store: Store, history: Sequence[Deployment], body: ActionBody, note: Note) -> Deployment:
    """Return the transition that an action asks for. Nothing is written.

    Args:
        store: contains the outcomes.
        history: history of the agent, oldest first, not empty.
        body: the action.
        note: reason and actor.

    Raises:
        ConfigError: it is not possible now, or not permitted.
    """
    current = history[-1]
    if body.action in ("shadow", "canary"):
        if body.share is None:
            raise ConfigError(f"give the share of the {body.action}, such as 0.05.")
        if body.action == "shadow":
            return compare_in_shadow(current, body.agent, body.share, note, {})
        given = {name: getattr(body, name) for name in ("outcomes", "guards", "wait_days") if getattr(body, name)}
        return compare_in_canary(current, body.agent, body.share, note, given)
    if body.action == "promote":
        made = promote(current, body.agent, note)
        _refuse_unknown_block(current)
        return weigh_promotion(store, history, made)
    return roll_back(history, body.agent, note)


def _refuse_unknown_block(current: Deployment) -> None:
    """Reject a promotion if the server cannot see whether the checkpoint is blocked.

    Raises:
        ConfigError: the checkpoint is not on this machine.
    """
    if current.checkpoint is not None and not Path(current.checkpoint).exists():
        raise ConfigError(
            f"not promoted: the server does not see {current.checkpoint}, so it does not know whether the"
            f" checkpoint is blocked. Where it is, run: lightning-rl deploy promote --agent {current.agent}."
        )
