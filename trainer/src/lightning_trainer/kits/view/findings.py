"""What is known about a candidate, as the viewer shows it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.acting.route import BY_KEY
from lightning_trainer.kits.deploy.approvals import APPROVAL, Approvals
from lightning_trainer.kits.deploy.display import Findings, read_findings
from lightning_trainer.kits.deploy.outcomes import GateRules, rules_of
from lightning_trainer.kits.deploy.promotion import missing_requirements
from lightning_trainer.kits.deploy.transitions import is_tried, named_in
from lightning_trainer.kits.loop.deployment import KEY
from lightning_trainer.kits.view.answers.deployments import (
    AgreementRow,
    BothRow,
    FindingsPage,
    GateRow,
    GuardrailRow,
    ProgramRow,
    ShadowJudgeRow,
    ShadowRow,
    TransitionRow,
)
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.lineage.blocks import block_of

_FRESH_S: Final = 5.0
_REST: Final = 20.0
_DAY_S: Final = 86_400.0
_COSTS: Final = (
    ("tokens", "prompt_tokens", "prompt tokens"), ("tokens", "completion_tokens", "response tokens"),
    ("seconds", "mean", "seconds, mean"), ("seconds", "p95", "seconds, 95 % of the calls"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownFindings:
    """Findings about one state of an agent.

    To weigh a canary, all of its outcomes and calls are read. So findings stay in use for some seconds, and for so long
    that reading those of all agents takes a twentieth of the time.

    Attributes:
        number: of the agent's newest transition.
        findings: see `read_findings`.
        problem: why they could not be read; None: they could.
        read_s: Unix time.
        took_s: seconds that reading them took.
        ended_s: monotonic time at which it ended.
    """

    number: int
    findings: Findings
    problem: str | None
    read_s: float
    took_s: float
    ended_s: float

    @classmethod
    def read(cls, reader: StoreReader, history: Sequence[Deployment]) -> KnownFindings:
        """Read the findings about an agent's candidate."""
        began_s, agent = time.monotonic(), history[-1].agent
        findings = read_findings(reader, {agent: history})[agent]
        now_s = time.monotonic()
        return cls(history[-1].number, findings, findings["problem"], time.time(), now_s - began_s, now_s)

    def is_old(self, agents: int) -> bool:
        """Whether they should be read again, if findings of so many agents are in use."""
        return time.monotonic() >= self.ended_s + max(_FRESH_S, _REST * agents * self.took_s)

    def holds(self, history: Sequence[Deployment]) -> bool:
        """Whether they are about the agent's newest transition."""
        return self.number == history[-1].number


def findings_page(
    history: Sequence[Deployment],
    known: KnownFindings,
    approvals: Approvals | None,
    served: Collection[str] | None = None,
) -> FindingsPage:
    """Return what is known about an agent's candidate.

    Args:
        history: its transitions, oldest first.
        known: result of `DeploymentReader.findings`.
        approvals: verifies approvals; None: this is not the server, so they are shown unverified.
        served: the models of the server; None: this is not the server.
    """
    newest, found = history[-1], known.findings
    approved = _find_unverified(history) if approvals is None else approvals.find(history)
    return FindingsPage(
        agent=newest.agent,
        number=newest.number,
        gate=_gate(found["gate"], rules_of(history)),
        guardrails=[GuardrailRow(name=name, **guard) for name, guard in (found["guardrails"] or {}).items()],
        shadow=_shadow(found["shadow"]),
        program=None if found["program"] is None else ProgramRow(**found["program"]),
        missing=[] if known.problem else _missing(history, found, approved, served),
        approval=None if approved is None else transition_row(approved),
        verified=approved is not None and approvals is not None,
        blocked=None if newest.checkpoint is None else block_of(Path(newest.checkpoint)),
        problem=known.problem,
        read_s=known.read_s,
    )


def _missing(
    history: Sequence[Deployment], found: Findings, approved: Deployment | None, served: Collection[str] | None
) -> list[str]:
    """Return what a promotion still needs, first of all a server that has the candidate."""
    newest, missing = history[-1], missing_requirements(history, found, approved)
    if served is None or not is_tried(newest) or newest.candidate in served:
        return missing
    return [
        f"a server with {newest.candidate}. This one does not have it, so it answers no call: see the log",
        *missing,
    ]


def transition_row(one: Deployment) -> TransitionRow:
    """Return a transition as pages show it."""
    return TransitionRow(
        number=one.number,
        stage=one.stage,
        stable=one.stable,
        candidate=one.candidate,
        share=one.share,
        reason=one.reason,
        actor=one.actor,
        at_s=one.at_ns / 1e9,
        note=_note(one),
    )


def _note(one: Deployment) -> str:
    marks = (
        (APPROVAL, APPROVAL),
        ("override", "without the gate"),
        (KEY, "named by the loop"),
        (BY_KEY, "in the viewer"),
    )
    notes = [text for name, text in marks if one.details.get(name)]
    evidence = one.details.get("evidence")
    if one.stage == "stable" and isinstance(evidence, Mapping) and isinstance(evidence.get("difference"), float):
        difference = f"{evidence['difference']:+.3f} [{evidence['low']:+.3f}, {evidence['high']:+.3f}]"
        notes.append(f"gate: {difference}, {evidence['n']} outcomes")
    return ", ".join(notes)


def _find_unverified(history: Sequence[Deployment]) -> Deployment | None:
    """Return the newest row since the candidate was named that looks like an approval."""
    named = named_in(history)
    if named is None or not is_tried(history[-1]):
        return None
    return next((one for one in reversed(history) if one.number > named.number and APPROVAL in one.details), None)


def _gate(found: Mapping[str, Any] | None, rules: GateRules | None) -> GateRow | None:
    if found is None or rules is None:
        return None
    return GateRow(**found, **asdict(rules.bounds), sources=list(rules.sources), wait_days=rules.wait_s / _DAY_S)


def _shadow(found: Mapping[str, Any] | None) -> ShadowRow | None:
    if found is None:
        return None
    counts = {name: found[name] for name in ("share", "copies", "conversations", "failed", "dropped", "off_path")}
    kinds = (("text", "same text"), ("tool_call", "same tool calls"))
    agreement = [AgreementRow(kind=label, **_estimate(found["agreement"][kind])) for kind, label in kinds]
    costs = [
        BothRow(name=label, candidate=found[unit]["candidate"][part], stable=found[unit]["stable"][part])
        for unit, part, label in _COSTS
    ]
    return ShadowRow(
        **counts,
        agreement=[row for row in agreement if row.n],
        judge=None if found["judge"] is None else ShadowJudgeRow(**found["judge"]),
        rules=[BothRow(name=name, **shares) for name, shares in found["rules"].items()],
        costs=costs,
    )


def _estimate(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("n", "mean", "low", "high")}
