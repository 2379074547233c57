"""The fingerprint of what the program gave its agents during an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from lightning_spans.adapter.adapt import adapt
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.session.fingerprint import AgentCalls, ProgramFingerprint

_MOST: Final = 500  # maximum samples to read: they soon show what all calls share
_AT_ONCE: Final = 64


def read_program(store: Store, samples: Sequence[Sample]) -> ProgramFingerprint:
    """Return the fingerprint of the program in these samples."""
    attempts = [one.attempt_id for one in samples if one.attempt_id is not None and one.status == "succeeded"][:_MOST]
    agents: defaultdict[str, AgentCalls] = defaultdict(AgentCalls)
    each: list[frozenset[str]] = []
    for first in range(0, len(attempts), _AT_ONCE):
        for trace in traces_of(store, attempt_ids=attempts[first : first + _AT_ONCE]):
            calls = [(one.agent_path or one.agent, one.request) for one in adapt(trace)]
            for path, request in calls:
                if path is not None and request:
                    agents[path].add(str(trace.attempt_id), request)
            each.append(frozenset(path for path, _ in calls if path is not None))
    return ProgramFingerprint(
        agents={path: calls.fingerprint() for path, calls in agents.items()},
        always=frozenset.intersection(*each) if each else frozenset(),
    )
