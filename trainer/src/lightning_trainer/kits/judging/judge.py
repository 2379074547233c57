"""Judge the groups of a batch: each in its own order, equal rollouts once, and known verdicts from the cache."""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import REQUEST, RESPONSE, Span
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.judges import NO_VERDICT, RolloutJudge
from lightning_trainer.kits.judging.asking import JudgeAnswer, JudgeScore, ask, key_of
from lightning_trainer.kits.judging.options import JudgeOptions
from lightning_trainer.kits.judging.spans import ASKED, ATTEMPTS, EVALUATE, EXPLANATION, NAME, SCORE
from lightning_trainer.kits.judging.transcript import Entries, entries_of
from lightning_trainer.outgoing import at_once, bearer
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.runner.target import JUDGE


class GroupJudge(RolloutJudge):
    """Gives rewards to rollouts by comparing those of a group.

    Args:
        options: of the judge.
        store: has the rollouts' traces; saves the judge's spans and rewards.
        seed: of the orders in which rollouts are sent.
        cache: file with verdicts by request; None: they are kept in memory only.
        send: calls a judge; replaceable in tests.
    """

    def __init__(
        self,
        options: JudgeOptions,
        store: Store,
        *,
        seed: int = 0,
        cache: Path | None = None,
        send: Callable[[JudgeOptions, Sequence[Entries]], JudgeAnswer] | None = None,
    ) -> None:
        import httpx

        headers = bearer(key_of(options), str(options.key_file or "LIGHTNING_JUDGE_KEY"))
        self._client = httpx.Client(headers=headers)
        self._send = send or (lambda options, attempts: ask(self._client, options, attempts))
        self._options = options
        self._store = store
        self._seed = seed
        self._path = cache
        self._lock = threading.Lock()
        self._known = _read(cache)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def verdicts(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes with the judge's rewards, which are also added to the store.

        Rollouts that did not succeed are not judged. If the judge gives no verdict, a group's rollouts are left out,
        each with the reason: no verdict is not a reward of 0.
        """
        groups: defaultdict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.attempt is not None:  # also after a crash: it counts if failures are left out
                groups[outcome.rollout.group_id].append(outcome)
        judged = at_once(self._group, list(groups.values()), self._options.concurrency)
        found = {outcome.rollout.rollout_id: outcome for some in judged for outcome in some}
        return [found.get(outcome.rollout.rollout_id, outcome) for outcome in outcomes]

    def _group(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        ids = [o.attempt.attempt_id for o in outcomes if o.attempt is not None]
        judged = self._passes(outcomes, ids)
        if isinstance(judged, str):
            return [replace(outcome, unjudged=f"{NO_VERDICT}: {judged}") for outcome in outcomes]
        given, asked = judged
        rewarded = [
            (outcome, self._reward(outcome, attempt_id, scores), scores)
            for outcome, attempt_id, scores in zip(outcomes, ids, given, strict=True)
        ]
        self._store.add_spans([self._span(reward, scores, asked) for _, reward, scores in rewarded])
        self._store.add_rewards([reward for _, reward, _ in rewarded])
        return [replace(outcome, rewards=(*outcome.rewards, reward)) for outcome, reward, _ in rewarded]

    def scores(self, outcomes: Sequence[Outcome]) -> list[float] | str:
        """Return the mean score of each succeeded rollout of a group, or why there is none. It is not a reward."""
        judged = self._passes(outcomes, [o.attempt.attempt_id for o in outcomes if o.attempt is not None])
        if isinstance(judged, str):
            return judged
        return [statistics.fmean(score.score for score in scores) for scores in judged[0]]

    def _passes(
        self, outcomes: Sequence[Outcome], ids: Sequence[str]
    ) -> tuple[list[list[JudgeScore]], list[str]] | str:
        """Return each rollout's score in every pass, and the traces of the judge's calls; or why there are none."""
        traces = {trace.attempt_id: trace for trace in traces_of(self._store, attempt_ids=ids)}
        told = [entries_of(traces[attempt_id]) for attempt_id in ids]
        different = list(dict.fromkeys(told))
        group = outcomes[0].rollout.group_id.rpartition(":")[2]
        passes = [self._verdict(different, group, number, ids) for number in range(self._options.passes)]
        if problem := next((found for found in passes if isinstance(found, str)), None):
            return problem
        verdicts = [found for found, _ in (each for each in passes if not isinstance(each, str))]
        asked = [trace_id for _, trace_id in (each for each in passes if not isinstance(each, str)) if trace_id]
        return [[verdict[entries] for verdict in verdicts] for entries in told], asked

    def _verdict(
        self, told: Sequence[Entries], group: str, number: int, attempt_ids: Sequence[str]
    ) -> tuple[dict[Entries, JudgeScore], str | None] | str:
        """Return the score of each distinct rollout and the judge call's trace (None: cached), or why there is none."""
        order = self._order(told, group, number)
        key = self._key(told, str(number))
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return {entries: known[_digest(entries)] for entries in told}, None
        answer = self._send(self._options, order)
        asked = self._judge_span(answer, attempt_ids)
        self._store.add_spans([asked])
        if answer.scores is None:
            return answer.error or "it said nothing"
        verdict = dict(zip(order, answer.scores, strict=True))
        self._keep(key, {_digest(entries): score for entries, score in verdict.items()})
        return verdict, asked.trace_id

    def _order(self, told: Sequence[Entries], group: str, number: int) -> list[Entries]:
        """Return rollouts in the order of a pass: after as many passes as there are rollouts, each was first once."""
        turn, first = divmod(number, len(told))
        order = list(told)
        random.Random(f"{self._seed}/{group}/{turn}").shuffle(order)
        return [*order[first:], *order[:first]]

    def _key(self, told: Sequence[Entries], number: str) -> str:
        """Return the cache key of what is judged, whatever its order."""
        o = self._options
        facts = [o.endpoint, o.model, o.rubric, o.temperature, o.max_tokens, o.max_chars, number]
        return _hash([*facts, sorted(map(_digest, told))])

    def _keep(self, key: str, verdict: dict[str, JudgeScore]) -> None:
        line = {"key": key, "scores": {name: [score.score, score.explanation] for name, score in verdict.items()}}
        with self._lock:
            self._known[key] = verdict
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    def _reward(self, outcome: Outcome, attempt_id: str, scores: Sequence[JudgeScore]) -> Reward:
        return Reward(
            rollout_id=outcome.rollout.rollout_id,
            attempt_id=attempt_id,
            value=self._options.weight * statistics.fmean(score.score for score in scores),
            source=JUDGE,
            reward_id=f"{JUDGE}/{attempt_id}",  # unchanged when judged again
        )

    def _span(self, reward: Reward, scores: Sequence[JudgeScore], asked: Sequence[str]) -> Span:
        """Return the verdict on an attempt, with the traces of the judge's calls."""
        now = time.time_ns()
        return Span(
            operation=EVALUATE,
            name=f"{JUDGE} {self._options.model}",
            trace_id=os.urandom(16).hex(),
            span_id=os.urandom(8).hex(),
            parent_id=None,
            rollout_id=reward.rollout_id,
            attempt_id=reward.attempt_id,
            start_ns=now,
            end_ns=now,
            status="ok",
            attributes={
                NAME: JUDGE,
                SCORE: statistics.fmean(score.score for score in scores),
                EXPLANATION: "\n".join(score.explanation for score in scores),
                ASKED: list(asked),
            },
        )

    def _judge_span(self, answer: JudgeAnswer, attempt_ids: Sequence[str]) -> Span:
        """Return a judge's call on a group as a span, which has no attempt because it is about several."""
        return Span(
            operation=EVALUATE,
            name=f"{JUDGE} {self._options.model}",
            trace_id=os.urandom(16).hex(),
            span_id=os.urandom(8).hex(),
            parent_id=None,
            start_ns=answer.start_ns,
            end_ns=answer.end_ns,
            status="ok" if answer.scores is not None else "error",
            status_message=answer.error or "",
            attributes={
                NAME: JUDGE,
                REQUEST: json.dumps(answer.request, ensure_ascii=False),
                RESPONSE: answer.response,
                ATTEMPTS: list(attempt_ids),
            },
        )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


def _digest(entries: Entries) -> str:
    return _hash(list(entries))


def _read(path: Path | None) -> dict[str, dict[str, JudgeScore]]:
    """Read the verdicts of a file, except a line that was cut off during writing."""
    found: dict[str, dict[str, JudgeScore]] = {}
    if path is None or not path.exists():
        return found
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")  # otherwise the next line would be lost with this one
    for text in lines:
        with suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            found[line["key"]] = {name: JudgeScore(*score) for name, score in line["scores"].items()}
    return found
