"""The stages in production. They read what is done from the table of deployments, which is the source of truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.approvals import APPROVAL, NEEDS_APPROVAL
from lightning_trainer.kits.deploy.outcomes import check_promotion, describe_gate, reject
from lightning_trainer.kits.deploy.policies.candidates import read_policy
from lightning_trainer.kits.deploy.program_watch import PROGRAM
from lightning_trainer.kits.deploy.promotion import make_promotion
from lightning_trainer.kits.deploy.shadow.summary import describe_shadow
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import (
    Note,
    Policy,
    begin_canary,
    begin_shadow,
    is_tried,
    name_candidate,
    roll_back,
)
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.methods.method import CHECKPOINT, PROMPTS, SERVED
from lightning_trainer.kits.loop.record import LoopRound, StageResult, Waiting
from lightning_trainer.lineage.blocks import refuse_blocked

KEY: Final = "loop"  # in the details of the row that names a candidate: the round
ACTOR: Final = "loop"


@dataclass(frozen=True, slots=True)
class CandidateStages:
    """The production stages of a round's candidate.

    Attributes:
        config: configuration of the loop.
        store: contains the table.
        current: the round.
    """

    config: LoopConfig
    store: Store
    current: LoopRound

    def name(self) -> StageResult | Waiting:
        """Name the candidate, if this round has not named it yet."""
        agent, policy = self.config.agent, self._policy()
        history = self._history()
        if not self._own(history):
            last = history[-1] if history else None
            if last is not None and is_tried(last):
                return Waiting(f"{agent} has the candidate {last.candidate} in the stage {last.stage}")
            if policy.checkpoint is not None:
                refuse_blocked(Path(policy.checkpoint), allowed=False)
            stable = self.config.stable if last is None else None
            named = name_candidate(last, agent, policy, self._note("new candidate"), stable=stable)
            needed = {NEEDS_APPROVAL: True} if self.config.approval else {}
            program = {PROGRAM: self.current.facts("evaluate").get(PROGRAM)}  # missing in a round of an earlier version
            keep(self.store, replace(named, details={KEY: self.current.key, **program, **needed}))
        return StageResult({"policy": policy.name})

    def _policy(self) -> Policy:
        """Return the policy that the round made."""
        learned = self.current.facts("train")
        if SERVED in learned:
            return read_policy(self.config.agent, None, None, None, learned[SERVED])
        made = Path(learned.get(PROMPTS) or learned[CHECKPOINT])
        return read_policy(self.config.agent, made, None, self.config.base, None)

    def shadow(self) -> StageResult | Waiting:
        """Let the candidate answer copies until there are enough of them."""
        options, history = self.config.shadow, self._history()
        own = self._own(history)
        if (end := _end(own)) is not None:
            return end
        if own[-1].stage == "candidate":
            begun = begin_shadow(own[-1], self.config.agent, options.share, self._note("shadow"))
            keep(self.store, replace(begun, details={SHADOW: self.config.shadow_rules.to_details()}))
            history = self._history()
        found = describe_shadow(self.store, history) or {"copies": 0, "failed": 0, "judge": None}
        facts = {"copies": found["copies"], "failed": found["failed"]}
        if self._own(history)[-1].stage == "canary":  # somebody started it by hand
            return StageResult(facts)
        if found["copies"] < options.copies:
            return Waiting(f"{found['copies']} copies of live calls, {options.copies} are needed")
        if found["failed"] > options.max_failed * found["copies"]:
            return self._drop(history, f"it failed to answer {found['failed']} of {found['copies']} copies")
        judge = found["judge"]
        if judge is not None and judge["high"] is not None and judge["high"] < 0.0:
            said = f"the judge prefers the stable policy: {judge['difference']:+.3f}"
            return self._drop(history, f"{said} [{judge['low']:+.3f}, {judge['high']:+.3f}]")
        return StageResult(facts)

    def canary(self) -> StageResult | Waiting:
        """Let the candidate answer users until the gate and the guardrails have decided."""
        history = self._history()
        own = self._own(history)
        if (end := _end(own)) is not None:
            return end
        if own[-1].stage != "canary":
            begun = begin_canary(own[-1], self.config.agent, self.config.canary.share, self._note("canary"))
            keep(self.store, replace(begun, details=self.config.canary.rules.to_details()))
            history = self._history()
        if (rejected := reject(self.store, history)) is not None:
            keep(self.store, rejected)
            return _stage_result(rejected)
        return self._decide(history)

    def promote(self) -> StageResult | Waiting:
        """Promote the candidate once a person has approved it. Only the server makes approvals."""
        history = self._history()
        own = self._own(history)
        if (end := _end(own)) is not None:
            return end
        if (rejected := reject(self.store, history)) is not None:
            keep(self.store, rejected)
            return _stage_result(rejected)
        if self.config.approval and not any(APPROVAL in row.details for row in own):
            return Waiting(
                f"a person's approval: lightning-rl deploy approve {self.config.agent} --candidate"
                f" {own[-1].candidate} --store URL --key-file FILE"
            )
        decided = self._decide(history)
        if isinstance(decided, Waiting):
            return decided
        made = make_promotion(self.store, history, self._note("the gate and the guardrails allow it"),
            url=self.config.store, key_file=self.config.key_file,
        )  # fmt: skip
        keep(self.store, made)
        return _stage_result(made)

    def _decide(self, history: Sequence[Deployment]) -> StageResult | Waiting:
        """Return the gate's decision. It waits for guardrails, whose outcomes may arrive later."""
        gate = describe_gate(self.store, history)
        if gate is None or gate["decision"] != "promote":
            counts = "" if gate is None else f": {gate['n']} of about {gate['needed']} outcomes"
            return Waiting(f"the decision of the gate{counts}")
        try:
            check_promotion(self.store, history, override=False)
        except ConfigError as error:
            return Waiting(str(error))
        return StageResult({name: gate[name] for name in ("n", "difference", "low", "high")})

    def _drop(self, history: Sequence[Deployment], reason: str) -> StageResult:
        dropped = roll_back(history, self.config.agent, self._note(reason))
        keep(self.store, dropped)
        return _stage_result(dropped)

    def _history(self) -> list[Deployment]:
        return read_histories(self.store).get(self.config.agent, [])

    def _own(self, history: Sequence[Deployment]) -> list[Deployment]:
        """Return the rows of this round's candidate: from the one that named it up to the next candidate's."""
        own: list[Deployment] = []
        for row in history:
            if own and row.stage == "candidate":
                break
            if own or row.details.get(KEY) == self.current.key:
                own.append(row)
        return own

    def _note(self, reason: str) -> Note:
        return Note(f"{reason} (round {self.current.number})", ACTOR)


def _end(own: Sequence[Deployment]) -> StageResult | None:
    """Return how the round ended, if the candidate was promoted or rolled back, by anyone."""
    if not own:
        raise ConfigError("the store no longer contains the row of this round's candidate. Is --store right?")
    return None if is_tried(own[-1]) else _stage_result(own[-1])


def _stage_result(row: Deployment) -> StageResult:
    outcome = "promoted" if row.stage == "stable" else "rolled back"
    return StageResult({"policy": row.stable if row.stage == "stable" else row.candidate}, outcome, row.reason)
