"""Deployments as the viewer shows them: the policies of each agent, and its transitions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlalchemy import func, select

from lightning_spans.errors import RefusedError
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.sql import schema
from lightning_trainer.config.passwords import without_password
from lightning_trainer.kits.deploy.approvals import needs_approval
from lightning_trainer.kits.deploy.outcomes import rules_of
from lightning_trainer.kits.deploy.table import read_histories
from lightning_trainer.kits.deploy.transitions import is_dropped, is_tried
from lightning_trainer.kits.view.answers.deployments import DeploymentPage, DeploymentRow
from lightning_trainer.kits.view.findings import KnownFindings, transition_row
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.runs import Run

Histories: TypeAlias = Mapping[str, Sequence[Deployment]]  # by agent, oldest first


def has_deployments(reader: StoreReader) -> bool:
    """Whether the store has a deployment."""
    with reader.reading() as connection:
        return connection.scalar(select(schema.deployments.c.seq).limit(1)) is not None


@dataclass(slots=True)
class DeploymentReader:
    """Reads deployments, and keeps what is current: each open page asks for it whenever something has changed."""

    _histories: dict[str, tuple[tuple[int, int], Histories]] = field(default_factory=dict)
    _known: dict[tuple[str, str], KnownFindings] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def histories(self, run: Run, reader: StoreReader) -> Histories:
        """Return all transitions by agent, oldest first."""
        seq = schema.deployments.c.seq
        with reader.reading() as connection:
            newest, number = connection.execute(select(func.max(seq), func.count(seq))).one()
        kept = self._histories.get(run.store)
        if kept is None or kept[0] != (newest, number):
            kept = self._histories[run.store] = (newest, number), read_histories(reader)
        return kept[1]

    def history(self, run: Run, reader: StoreReader, agent: str) -> Sequence[Deployment]:
        """Return the transitions of an agent, oldest first.

        Raises:
            RefusedError: it has none.
        """
        found = self.histories(run, reader).get(agent)
        if found is None:
            raise RefusedError(f"{agent!r} has no deployment in this store")
        return found

    def findings(self, run: Run, reader: StoreReader, history: Sequence[Deployment]) -> KnownFindings:
        """Return the findings about a candidate, which may be some seconds old. One agent is read at a time."""
        place = run.store, history[-1].agent
        known = self._known.get(place)
        if known is not None and self._is_usable(known, history):
            return known
        if known is not None and known.holds(history) and self._reading.locked():
            return known
        with self._reading:
            known = self._known.get(place)
            if known is None or not self._is_usable(known, history):
                known = self._known[place] = KnownFindings.read(reader, history)
            return known

    def _is_usable(self, known: KnownFindings, history: Sequence[Deployment]) -> bool:
        return known.holds(history) and not known.is_old(len(self._known))


def agent_row(history: Sequence[Deployment]) -> DeploymentRow:
    """Return an agent as the list shows it."""
    newest = history[-1]
    return DeploymentRow(
        agent=newest.agent,
        newest=transition_row(newest),
        previous=newest.previous,
        tried=is_tried(newest),
        dropped=is_dropped(history),
        needs_approval=is_tried(newest) and needs_approval(history),
    )


def agent_page(
    run: Run, history: Sequence[Deployment], *, before: int | None, limit: int, acts: bool
) -> DeploymentPage:
    """Return an agent with some of its transitions.

    Args:
        run: whose store it is.
        history: all of its transitions, oldest first.
        before: number of the transition before which the page starts; None: with the newest.
        limit: most transitions in the page.
        acts: see `DeploymentPage`.
    """
    older = [one for one in reversed(history) if before is None or one.number < before]
    newest = history[-1]
    return DeploymentPage(
        row=agent_row(history),
        checkpoint=newest.checkpoint,
        base=newest.base,
        has_gate=rules_of(history) is not None,
        transitions=len(history),
        history=[transition_row(one) for one in older[:limit]],
        next=older[limit - 1].number if len(older) > limit else None,
        acts=acts,
        store=without_password(run.store),
    )
