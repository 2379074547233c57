"""Promotions and their requirements: a canary, an unblocked checkpoint, an approval, and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.approvals import Approvals, is_url, needs_approval
from lightning_trainer.kits.deploy.outcomes import check_promotion
from lightning_trainer.kits.deploy.transitions import Note, promote
from lightning_trainer.lineage.blocks import refuse_blocked


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
    if history[-1].checkpoint is not None:
        refuse_blocked(Path(history[-1].checkpoint), allowed=allow_blocked)
    if needs_approval(history) and not is_url(url):  # a server checks it itself
        Approvals.beside(key_file).check(history, made.stable)
    return replace(made, details=check_promotion(store, history, override=override))
