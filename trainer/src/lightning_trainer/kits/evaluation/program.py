"""The fingerprint of what the program gave its agents during an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_spans.adapter.adapt import adapt
from lightning_spans.record.prompts import Prompts, name_of_prompt, own_body
from lightning_spans.schema.spans import Json
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.session.fingerprint import AgentCalls, ProgramFingerprint

_MOST: Final = 500  # maximum samples to read: they soon show what all calls share
_AT_ONCE: Final = 64


def read_program(store: Store, samples: Sequence[Sample], prompts: Prompts) -> ProgramFingerprint:
    """Return the fingerprint of the program in these samples.

    Args:
        store: with the samples.
        samples: of an evaluation.
        prompts: those that replaced the program's own, which the fingerprint has.
    """
    attempts = [one.attempt_id for one in samples if one.attempt_id is not None and one.status == "succeeded"][:_MOST]
    agents: defaultdict[str, AgentCalls] = defaultdict(AgentCalls)
    each: list[frozenset[str]] = []
    for first in range(0, len(attempts), _AT_ONCE):
        for trace in traces_of(store, attempt_ids=attempts[first : first + _AT_ONCE]):
            calls = [(one.agent_path or one.agent, one.request) for one in adapt(trace)]
            for path, request in calls:
                if path is not None and request:
                    agents[path].add(str(trace.attempt_id), _own_request(request, path, prompts))
            each.append(frozenset(path for path, _ in calls if path is not None))
    return ProgramFingerprint(
        agents={path: calls.fingerprint() for path, calls in agents.items()},
        always=frozenset.intersection(*each) if each else frozenset(),
    )


def _own_request(request: Mapping[str, Json], agent: str, prompts: Prompts) -> Mapping[str, Json]:
    name = name_of_prompt(prompts, agent)
    own = own_body(request, **prompts[name]) if name is not None else None
    return request if own is None else own
