"""Deployments: which policy answers each agent, what is known about its candidate, and the rounds of loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_spans.store.deployments import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRow:
    """A transition of an agent's policy.

    Attributes:
        number: 1 for the agent's first.
        stage: the candidate's stage after it.
        stable: the policy that answers all calls, or in a canary all others.
        candidate: the policy that is tested or was rolled back.
        share: of the conversations that the candidate answers or gets copies of.
        reason: why it was made.
        actor: who made it.
        at_s: Unix time.
        note: what is special about it: an approval, a promotion without the gate, a round of the loop; "" if nothing.
    """

    number: int
    stage: Stage
    stable: str
    candidate: str | None
    share: float
    reason: str
    actor: str
    at_s: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """The policies of an agent.

    Attributes:
        agent: its name.
        newest: its newest transition.
        previous: the stable policy before the last promotion.
        tried: whether there is a candidate that is neither promoted nor rolled back.
        dropped: whether the newest transition rolled back a candidate that was not promoted. A return from the last
            promotion then needs ``--last-promotion``.
        needs_approval: whether a person must approve the candidate.
    """

    agent: str
    newest: TransitionRow
    previous: str | None
    tried: bool
    dropped: bool
    needs_approval: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStageRow:
    """A stage of a round: `done_s` is the Unix time at which it was done, `text` its result or what it waits for."""

    stage: str
    state: str
    done_s: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRow:
    """A loop.

    Attributes:
        agent: whose policy it improves.
        folder: of the loop.
        round: number of its newest round.
        outcome: how that round ended; None: it is running.
        reason: why it ended.
        stages: of that round.
        earlier: a line for each round before, the newest first.
        problem: why its record can't be read; None: it can.
    """

    agent: str
    folder: str
    round: int
    outcome: str | None
    reason: str
    stages: list[LoopStageRow]
    earlier: list[str]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentsPage:
    """All agents that have a deployment, and the loops."""

    agents: list[DeploymentRow]
    loops: list[LoopRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPage:
    """An agent with some of its transitions, the newest first.

    Attributes:
        row: its policies.
        checkpoint: folder of the candidate's adapter; None: the server has the candidate under its name.
        base: the model on whose servers the adapter is loaded.
        has_gate: whether the candidate's canary has begun, so that its bounds are fixed.
        transitions: number of all transitions.
        history: some of them.
        next: where the next page starts; None at the end.
        acts: whether this server changes deployments for the holder of a deployer's key.
        store: the store for commands in a terminal, without passwords.
    """

    row: DeploymentRow
    checkpoint: str | None
    base: str | None
    has_gate: bool
    transitions: int
    history: list[TransitionRow]
    next: int | None
    acts: bool
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """The gate of a canary: its evidence and its bounds.

    Attributes:
        n: number of outcomes.
        candidate: of them those of the candidate.
        stable: those of the stable policy.
        needed: about how many are needed at this share; None: there is nothing to compare with.
        difference: of the means, candidate minus stable policy; None: too few outcomes.
        low: lower end of the 95 % interval, which holds for all looks together.
        high: upper end.
        decision: of the gate.
        worse, better, false_promotion, power: see `gate.Bounds`.
        sources: of the rewards that count; []: all.
        wait_days: age from which a conversation counts.
    """

    n: int
    candidate: int
    stable: int
    needed: int | None
    difference: float | None
    low: float | None
    high: float | None
    decision: Literal["promote", "reject", "wait"]
    worse: float
    better: float
    false_promotion: float
    power: float
    sources: list[str]
    wait_days: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailRow:
    """A guardrail: by how much the candidate's share of bad calls is larger, and how much is allowed."""

    name: str
    bound: float
    candidate: int
    stable: int
    difference: float | None
    low: float | None
    high: float | None
    alarm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """The share of answers of one kind that agree; None without such answers."""

    kind: str
    n: int
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowJudgeRow:
    """By how much a judge prefers the candidate; None: too few verdicts."""

    n: int
    difference: float | None
    low: float | None
    high: float | None
    failed: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BothRow:
    """A number of both policies."""

    name: str
    candidate: float | None
    stable: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRow:
    """The comparison of a shadow. `rules` are shares of bad answers, `costs` tokens and seconds per call."""

    share: float
    copies: int
    conversations: int
    failed: int
    dropped: int
    off_path: int
    agreement: list[AgreementRow]
    judge: ShadowJudgeRow | None
    rules: list[BothRow]
    costs: list[BothRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRow:
    """Changes of the program since the candidate's evaluation; compared from `needed` conversations on."""

    conversations: int
    needed: int
    changes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsPage:
    """What is known about an agent's candidate.

    Attributes:
        agent: its name.
        number: of the transition for which this holds.
        gate: None outside of a canary.
        guardrails: of the canary.
        shadow: None if there was none.
        program: None without an evaluation.
        missing: what a promotion still needs; [] if nothing, or without a candidate.
        approval: the candidate's approval; None: there is none.
        verified: whether the approval's signature was verified; only the server can do so.
        blocked: why the checkpoint is blocked; None: it is not, or its folder is not on this machine.
        problem: why nothing is known, such as an invalid reward; None: everything could be read.
        read_s: Unix time at which the store was read.
    """

    agent: str
    number: int
    gate: GateRow | None
    guardrails: list[GuardrailRow]
    shadow: ShadowRow | None
    program: ProgramRow | None
    missing: list[str]
    approval: TransitionRow | None
    verified: bool
    blocked: str | None
    problem: str | None
    read_s: float
