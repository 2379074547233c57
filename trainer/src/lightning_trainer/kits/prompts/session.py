"""Run the unchanged program under candidates: each rollout carries its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from lightning_spans.errors import AgentFailedError
from lightning_spans.store.traces import traces_of
from lightning_trainer.report.failures import advice
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.rollouts import Outcome, outcomes, plan
from lightning_trainer.rl.usage import tokens_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.session.session import Session


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One execution under a candidate.

    Attributes:
        outcome: of the rollout.
        trace: of the attempt that counts; None if there is none.
    """

    outcome: Outcome
    trace: Trace | None


@dataclass
class CandidateRunner:
    """Runs tasks under candidates.

    Attributes:
        session: of the program. The routing of its server assigns the candidates to their rollouts.
        progress: callback for progress events.
        check: raises if the program was asked to stop.
        timeout_s: of an attempt.
        max_attempts: of a rollout.
        name: of the search. The ids of its rollouts are derived from it, so a resumed search finds those of the
            interrupted batch.
        rollouts: number of rollouts so far.
        again: number of rollouts that were interrupted and run again.
        tokens: tokens of all their model calls, prompts and answers.
    """

    session: Session
    progress: Progress
    check: Callable[[], None]
    timeout_s: float
    max_attempts: int
    name: str
    rollouts: int = 0
    again: int = 0
    tokens: int = 0

    def skip(self, rollouts: int, again: int, tokens: int) -> None:
        """Count a batch that was already run."""
        self.rollouts += rollouts
        self.again += again
        self.tokens += tokens

    def run(self, tasks: Sequence[Mapping[str, Any]], prompts: Mapping[str, Mapping[str, str]]) -> list[CandidateRun]:
        """Run each task once, with these prompts instead of the agents' own.

        Raises:
            AgentFailedError: every rollout failed, and none because of a model's answer.
        """
        rollouts = self._plan(tasks)
        state = self.session.app.state
        carried = {rollout.rollout_id: prompts for rollout in rollouts} if prompts else {}
        state.routing = replace(state.routing, prompts=carried)
        found = self.session.run(rollouts, self.progress, "tasks under a candidate", check=self.check)
        self.rollouts += len(rollouts)
        if all(outcome.attempt is None and outcome.crash is None for outcome in found):
            raise AgentFailedError(
                f"all {len(found)} rollouts failed. The last error:\n{(found[-1].error or '')[-1500:]}\n"
                f"{advice([outcome.error or '' for outcome in found])}"
            )
        counted = [outcome.crash or outcome.attempt for outcome in found]
        traces = {trace.attempt_id: trace for trace in self._count_tokens(rollout.rollout_id for rollout in rollouts)}
        return [
            CandidateRun(o, None if a is None else traces.get(a.attempt_id))
            for o, a in zip(found, counted, strict=True)
        ]

    def _plan(self, tasks: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        """Plan the rollouts of a batch. Of those that an earlier process started, the ones that count are kept."""
        store, begun = self.session.store, 0
        kept: dict[int, Rollout] = {}
        for turn in count():
            name = f"prompts-{self.name}.{self.rollouts}{f'.{turn}' if turn else ''}:p"
            planned = plan(
                tasks, name=name, size=1, mode="prompts", max_attempts=self.max_attempts, timeout_s=self.timeout_s
            )
            there = store.rollouts(rollout_ids=[rollout.rollout_id for rollout in planned])
            if not there:
                break
            store.cancel([rollout.rollout_id for rollout in there])
            ended = [rollout for rollout in there if rollout.status in {"succeeded", "failed"}]
            places = {rollout.rollout_id: place for place, rollout in enumerate(planned)}
            counted = [o.rollout for o in outcomes(store, ended) if o.attempt is not None or o.crash is not None]
            kept |= {places[rollout.rollout_id]: rollout for rollout in counted}
            tried = {attempt.rollout.rollout_id for attempt in store.attempts(rollout_ids=list(places))}
            interrupted = tried - {rollout.rollout_id for rollout in counted}
            begun += len(interrupted)
            self._count_tokens(interrupted)
        self.again += begun
        return [kept.get(place, rollout) for place, rollout in enumerate(planned)]

    def _count_tokens(self, rollout_ids: Iterable[str]) -> list[Trace]:
        """Add the tokens of all attempts of these rollouts, and return their traces."""
        traces = traces_of(self.session.store, rollout_ids=list(rollout_ids))
        self.tokens += sum(sum(tokens_of(node)) for trace in traces for node in trace.chats)
        return traces
