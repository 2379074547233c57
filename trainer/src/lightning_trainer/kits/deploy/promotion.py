"""Promotions and their requirements: a canary, an unblocked checkpoint, an approval, program, guardrails and gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.approvals import Approvals, is_url, needs_approval
from lightning_trainer.kits.deploy.outcomes import check_promotion, find_obstacles
from lightning_trainer.kits.deploy.transitions import Note, is_tried, promote
from lightning_trainer.lineage.blocks import block_of, refuse_blocked


def make_promotion(
    store: Store,
    history: Sequence[Deployment],
    note: Note,
    *,
    url: str,
    key_file: Path | None,
    override: bool = False,
    allow_blocked: bool = False,
) -> Deployment:
    """Return the transition that promotes an agent's candidate.

    Args:
        store: contains the outcomes.
        history: history of the agent, oldest first, not empty.
        note: reason and actor.
        url: URL of the store.
        key_file: the server's own, if the store is not a server: its secret verifies an approval.
        override: promote without the gate.
        allow_blocked: also promote a blocked checkpoint.

    Raises:
        ConfigError: a requirement is not met.
    """
    made = promote(history[-1], history[-1].agent, note)
    if needs_approval(history) and not is_url(url):  # a server checks it itself
        Approvals.beside(key_file).check(history, made.stable)
    return weigh_promotion(store, history, made, override=override, allow_blocked=allow_blocked)


def weigh_promotion(
    store: Store,
    history: Sequence[Deployment],
    made: Deployment,
    *,
    override: bool = False,
    allow_blocked: bool = False,
) -> Deployment:
    """Return a promotion with its evidence, if everything but a person's approval permits it; see `make_promotion`.

    Raises:
        ConfigError: a requirement is not met.
    """
    if history[-1].checkpoint is not None:
        refuse_blocked(Path(history[-1].checkpoint), allowed=allow_blocked)
    return replace(made, details=check_promotion(store, history, override=override))


def missing_requirements(
    history: Sequence[Deployment], findings: Mapping[str, Any], approved: Deployment | None
) -> list[str]:
    """Return what the promotion of a candidate still needs, as sentences without a full stop.

    Args:
        history: history of the agent, oldest first, not empty.
        findings: `gate`, `guardrails` and `program`; see `display.read_findings`.
        approved: the approval of the candidate; None if there is none.
    """
    current = history[-1]
    if not is_tried(current):
        return []
    missing = []
    if (reason := block_of(Path(current.checkpoint)) if current.checkpoint else None) is not None:
        missing.append(f"the checkpoint {current.checkpoint} is blocked: {reason}")
    if current.stage != "canary":
        missing.append(f"a canary: the candidate is in the stage {current.stage}, so no outcome is known")
    elif findings["gate"] is None:
        missing.append("a gate: the canary was begun without one. Begin it again")
    else:
        missing += find_obstacles(history, findings["gate"], findings["guardrails"], findings["program"])
    if needs_approval(history) and approved is None:
        missing.append(f"a person's approval of {current.candidate}")
    return missing
