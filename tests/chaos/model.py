"""What must be after any number of kills. Pure functions of what was acknowledged and what is in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_spans.schema.attempts import FAILED, AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span


def lost(what: str, acknowledged: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Everything acknowledged is there, once."""
    counts = Counter(kept)
    gone = [name for name in set(acknowledged) if not counts[name]]
    twice = [name for name, count in counts.items() if count > 1]
    problems = [f"{len(gone)} {what} were acknowledged and are not there, such as {gone[0]}"] if gone else []
    return problems + ([f"{len(twice)} {what} are there twice, such as {twice[0]}"] if twice else [])


def queue_problems(
    rollouts: Sequence[Rollout], attempts: Sequence[AttemptRecord], rewards: Sequence[Reward]
) -> list[str]:
    """Each rollout succeeds once at most, and has the reward of that attempt; nothing is left open."""
    problems = []
    good = Counter(attempt.rollout.rollout_id for attempt in attempts if attempt.status == "succeeded")
    for rollout in rollouts:
        if rollout.status in {"queued", "running"}:
            problems.append(f"rollout {rollout.rollout_id} is still {rollout.status}")
        if good[rollout.rollout_id] != (rollout.status == "succeeded"):
            problems.append(f"rollout {rollout.rollout_id} is {rollout.status} with {good[rollout.rollout_id]} ends")
    fences = [attempt.fence for attempt in attempts]
    if len(set(fences)) != len(fences):
        problems.append("two attempts have one fencing number")
    paid = Counter(reward.attempt_id for reward in rewards if reward.source == "run")
    problems += [
        f"attempt {attempt.attempt_id}, {attempt.status}, has {paid[attempt.attempt_id]} rewards"
        for attempt in attempts
        if paid[attempt.attempt_id] != (attempt.status == "succeeded")
    ]
    return problems


def trace_problems(attempts: Sequence[AttemptRecord], calls: Sequence[Call], spans: Sequence[Span]) -> list[str]:
    """An attempt that succeeded has both its calls, both its spans, and they belong together."""
    asked: dict[str | None, set[str | None]] = {}
    seen: dict[str | None, set[str | None]] = {}
    for call in calls:
        if call.error is None:
            asked.setdefault(call.attempt_id, set()).add(call.span_id)
    for span in spans:
        seen.setdefault(span.attempt_id, set()).add(span.span_id)
    good = [attempt.attempt_id for attempt in attempts if attempt.status == "succeeded"]
    bad = [a for a in good if len(asked.get(a, ())) != 2 or asked.get(a) != seen.get(a)]
    if not bad:
        return []
    first = f"calls {asked.get(bad[0])}, spans {seen.get(bad[0])}"
    return [f"{len(bad)} attempts succeeded without both calls and spans, such as {bad[0]}: {first}"]


def batch_problems(
    batches: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], attempts: Sequence[AttemptRecord]
) -> list[str]:
    """Every batch hashes as in the undisturbed run, in whichever life it was made, and holds each rollout once.

    An agent that was killed while it ran alone has failed, as far as anybody can know: that counts in its group, and
    its next attempt samples anew, so such a batch has no hash to be compared with.
    """
    expected = {batch["step"]: batch["hash"] for batch in undisturbed}
    good = {attempt.attempt_id: attempt for attempt in attempts if attempt.status in {"succeeded", "failed"}}
    failed = {_group(attempt.attempt_id) for attempt in attempts if attempt.status in FAILED}
    problems, compared = [], 0
    for batch in batches:
        step = batch["step"]
        same = failed.isdisjoint(map(_group, batch["attempts"]))
        compared += same
        if same and batch["hash"] != expected.get(step):
            problems.append(f"the batch of step {step} is {batch['hash'][:12]}, undisturbed {expected.get(step)}")
        rollouts = [attempt_id.rpartition(".")[0] for attempt_id in batch["attempts"]]
        if len(set(rollouts)) != len(rollouts):
            problems.append(f"a rollout is twice in the batch of step {step}")
        strangers = [attempt_id for attempt_id in batch["attempts"] if attempt_id not in good]
        if strangers:
            problems.append(f"the batch of step {step} holds {strangers[0]}, which did not succeed")
    print(f"{compared} of {len(batches)} batches compared with the undisturbed run's")
    if batches and not compared:
        problems.append("no batch could be compared")
    steps = sorted({batch["step"] for batch in batches})
    if steps != list(range(len(steps))):
        problems.append(f"steps are missing: {steps}")
    return problems


def _group(attempt_id: str) -> str:
    """Return ``run:step-task`` of an attempt ``run:step-task-member.number``."""
    return attempt_id.rpartition("-")[0]
