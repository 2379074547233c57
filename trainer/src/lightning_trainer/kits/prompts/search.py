"""The search of GEPA over candidates within a budget, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spans.errors import LightningError
from lightning_trainer.kits.prompts import journal, result
from lightning_trainer.kits.prompts.adapter import CEILING, SpansAdapter
from lightning_trainer.kits.prompts.options import PromptsConfig
from lightning_trainer.kits.prompts.reflection import Reflection
from lightning_trainer.kits.prompts.session import CandidateRunner
from lightning_trainer.report.progress import Progress
from lightning_trainer.report.terminal import decimal
from lightning_trainer.run.data import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """Result of `optimise()`.

    Attributes:
        before: mean reward of the agents' own prompts, on the validation tasks.
        after: that of the best prompts.
        file: with the changed prompts.
        diff: for people.
        rollouts: number of rollouts, including those of an earlier part.
        tokens: of rollouts and of the reflecting model, including those of an earlier part.
        candidates: number of candidates that were tried on all validation tasks.
        ended: why the search ended: ``rollouts`` or ``tokens`` were spent, or ``ceiling``: nothing is left to improve.
    """

    before: float
    after: float
    file: Path
    diff: str
    rollouts: int
    tokens: int
    candidates: int
    ended: str

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl prompts --json` prints."""
        names = ("before", "after", "rollouts", "tokens", "candidates", "ended")
        told = {name: getattr(self, name) for name in names}
        return {**told, "file": str(self.file), "changed": bool(self.diff)}


class Search:
    """One search, from the agents' own prompts.

    Args:
        config: the options.
        opened: runs the program under a candidate.
        before: the agents' own prompts.
        folder: of the search, with its journal.
        progress: callback for progress events.
    """

    def __init__(
        self, config: PromptsConfig, opened: CandidateRunner, before: dict[str, str], folder: Path, progress: Progress
    ) -> None:
        self._config = config
        self._opened = opened
        self._before = before
        self._folder = folder
        self._progress = progress
        self._paid = journal.SearchJournal(folder / journal.FILE)
        self._reflection = Reflection(config.reflect, self._paid, self._wait)
        declared = config.work.declared(command=config.command, reward=config.reward)
        self._adapter = SpansAdapter(opened, before, self._paid, CEILING if declared is None else declared[1])

    def run(self, train: Sequence[Task], val: Sequence[Task]) -> PromptResult:
        """Search until the budget is spent or nothing is left to improve, and write the best prompts.

        Raises:
            LightningError: the model that reflects failed, or no candidate can be tried.
        """
        import gepa

        (self._folder / "gepa_state.bin").unlink(missing_ok=True)  # GEPA would resume from it, with other choices
        minibatch = min(self._config.minibatch, len(train))
        found = gepa.optimize(
            seed_candidate=dict(self._before),
            trainset=list(train),
            valset=list(val),
            adapter=self._adapter,
            reflection_lm=self._reflection,
            reflection_minibatch_size=minibatch,
            skip_perfect_score=False,  # the adapter knows which score is perfect
            stop_callbacks=[self._is_over],
            run_dir=str(self._folder),
            callbacks=[_StepReporter(self._progress, self._paid, minibatch)],
            logger=_Quiet(),
            seed=self._config.seed,
        )
        return self._write_best(found.candidates, found.val_aggregate_scores)

    def _write_best(self, candidates: Sequence[dict[str, str]], scores: Sequence[float]) -> PromptResult:
        config, reflection, rollouts = self._config, self._reflection, self._rollouts
        best = max(range(len(scores)), key=lambda place: (scores[place], -place))
        if best or reflection.failed is None:
            facts = {"reward_before": scores[0], "reward_after": scores[best], "rollouts": rollouts}
            written = result.write(config.out, self._before, candidates[best], facts)
        if reflection.failed is not None:
            raise LightningError(_failure_message(reflection.failed, config.out if best else None, rollouts))
        return PromptResult(
            before=scores[0],
            after=scores[best],
            file=config.out,
            diff=written.read_text(encoding="utf-8"),
            rollouts=rollouts,
            tokens=self._tokens,
            candidates=len(scores),
            ended=self._ended_by(),
        )

    @property
    def _rollouts(self) -> int:
        return self._opened.rollouts + self._opened.again

    @property
    def _tokens(self) -> int:
        return self._opened.tokens + self._reflection.tokens

    def _out_of_tokens(self) -> bool:
        return self._config.tokens is not None and self._tokens >= self._config.tokens

    def _is_over(self, state: Any) -> bool:
        if self._reflection.failed is not None or self._adapter.at_ceiling(state):
            return True
        return not self._paid.waits and (self._rollouts >= self._config.budget or self._out_of_tokens())

    def _ended_by(self) -> str:
        if self._adapter.reached_ceiling:
            return "ceiling"
        return "tokens" if self._out_of_tokens() and self._rollouts < self._config.budget else "rollouts"

    def _wait(self) -> None:
        self._progress.phase("a proposal of the reflection model")
        self._opened.check()


def _failure_message(reason: LightningError, best: Path | None, rollouts: int) -> str:
    so_far = "No better candidate was found so far" if best is None else f"The best candidate so far is in {best}"
    return f"{reason}. {so_far}; {rollouts} rollouts are kept. Continue with --resume."


class _Quiet:
    """GEPA's log, which is discarded: `_StepReporter` reports what matters."""

    def log(self, message: str) -> None:
        """Discard the message."""


class _StepReporter:
    """Reports each of GEPA's steps once: the mean reward on a minibatch, of which GEPA gives the sum."""

    def __init__(self, progress: Progress, paid: journal.SearchJournal, minibatch: int) -> None:
        self._progress = progress
        self._paid = paid
        self._minibatch = minibatch

    def on_candidate_accepted(self, event: Any) -> None:
        """Report a candidate that was better on its tasks."""
        if not self._paid.waits:
            mean = self._mean(event["new_score"])
            self._progress.note(f"candidate {event['new_candidate_idx']} is kept: reward {mean} on its tasks")

    def on_candidate_rejected(self, event: Any) -> None:
        """Report a candidate that was not."""
        if not self._paid.waits:
            old, new = self._mean(event["old_score"]), self._mean(event["new_score"])
            self._progress.note(f"a candidate is dropped: reward {old} to {new} on its tasks")

    def _mean(self, total: float) -> str:
        return decimal(total / self._minibatch)
