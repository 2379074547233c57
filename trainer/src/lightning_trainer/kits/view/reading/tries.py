"""The same task at several times: before and after training, at two steps, by both sides of an evaluation."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import func, select

from lightning_spans.errors import RefusedError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.json import loads
from lightning_spans.store.sql import schema
from lightning_trainer.kits.view.answers.groups import TriedGroup, TriedTask, TriesPage
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import rewards_by_group, steps_by_group, task_text, within
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.run.group_ids import step_of

_ENDED: Final = ("succeeded", "failed")  # a cancelled or running rollout does not measure the model
_MOST: Final = 20_000  # newest groups, in which equal tasks are searched
_TASK: Final = 300
_LONGEST: Final = 4000  # most characters of a task in a command


def tries_page(reader: StoreReader, run: Run, *, worse: bool, after: int, limit: int) -> TriesPage:
    """Return tasks that were run at several times, the most improved first; with `worse`, the least improved."""
    tasks = sorted(_tasks(reader, run), key=_change, reverse=not worse)
    following = after + limit
    return TriesPage(
        tasks=tasks[after:following],
        total=len(tasks),
        next=following if following < len(tasks) else None,
        commands=[],
    )


def tries_of(reader: StoreReader, run: Run, group: str) -> TriesPage:
    """Return the times at which the task of a group was run, and the commands that run it with both models.

    Raises:
        RefusedError: there is no such group.
    """
    rollout = next(iter(reader.rollouts(group_ids=[group])), None)
    if rollout is None:
        raise RefusedError(f"there is no group {group!r} in this run")
    found = [each for each in _tasks(reader, run, only=_name(rollout.task)) if each.groups]
    return TriesPage(tasks=found, total=len(found), next=None, commands=_commands(run, rollout))


def _tasks(reader: StoreReader, run: Run, only: bytes | None = None) -> list[TriedTask]:
    """Return the groups of equal tasks together, in the order in which they were queued."""
    rollouts = schema.rollouts.c
    first = select(func.min(rollouts.seq).label("seq"), func.count().label("rollouts")).group_by(rollouts.group_id)
    first = first.where(rollouts.replay.is_(None))  # a fork is not a separate try: most of it is from its record
    first = first.where(rollouts.status.in_(_ENDED))
    newest = first.where(within(run)).order_by(func.min(rollouts.seq).desc()).limit(_MOST).subquery()
    query = (
        select(rollouts.group_id, rollouts.task, newest.c.rollouts)
        .join(newest, rollouts.seq == newest.c.seq)
        .order_by(rollouts.seq)
    )
    found: defaultdict[bytes, list[tuple[str, int]]] = defaultdict(list)
    texts: dict[bytes, str] = {}
    with reader.reading() as connection:
        groups = steps_by_group(connection, run)
        for group_id, text, number in connection.execute(query):
            task = loads(text)
            name = _name(task)
            if group_id in groups and only in (None, name):
                found[name].append((group_id, number))
                texts.setdefault(name, task_text(Rollout(rollout_id="", group_id=group_id, task=task), _TASK))
        several = [name for name, its in found.items() if only is not None or _times(its) > 1]
        means = rewards_by_group(connection, run, groups) if several else {}
    return [
        TriedTask(task=texts[name], groups=[_group(group, number, means) for group, number in found[name]])
        for name in several
    ]


def _name(task: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode(errors="surrogatepass")).digest()


def _times(groups: Sequence[tuple[str, int]]) -> int:
    return len({_when(group) for group, _ in groups})


def _when(group_id: str) -> str:
    """Return the name of a group's time: the same for all groups that were queued together."""
    step = step_of(group_id)
    return f"{step.mode} {step.number}" if step.mode != "other" else group_id.rpartition(":")[0]


def _group(group_id: str, number: int, means: Mapping[str, tuple[int, float]]) -> TriedGroup:
    step = step_of(group_id)
    rewarded, total = means.get(group_id, (0, 0.0))
    return TriedGroup(
        group_id=group_id,
        mode=step.mode,
        step=step.number,
        name=group_id.rpartition(":")[0] or group_id,
        rollouts=number,
        mean=total / rewarded if rewarded else None,
    )


def _change(task: TriedTask) -> float:
    """Return the improvement from the first time to the last; 0 if one of them is unknown."""
    first, last = task.groups[0].mean, task.groups[-1].mean
    return 0.0 if first is None or last is None else last - first


def _commands(run: Run, rollout: Rollout) -> list[str]:
    """Return the commands that run a task with the tuned and the base model; [] if they cannot be made."""
    options = run.options
    model, program = options.get("model"), options.get("target") or options.get("command")
    task = json.dumps(dict(rollout.task))  # non-ASCII characters are escaped: what is shown is what is copied
    if run.folder is None or not isinstance(model, str) or not isinstance(program, str) or len(task) > _LONGEST:
        return []
    how = [program] if options.get("target") else ["--command", program]
    how += ["--reward", str(options["reward"])] if isinstance(options.get("reward"), str) else []
    tuned = str(run.folder)
    return [
        f"printf '%s\\n' {shlex.quote(task)} > task.jsonl",
        (
            f"lightning-rl eval {shlex.join(how)} --data task.jsonl --model {shlex.quote(tuned)}"
            f" --against {shlex.quote(model)} --samples 4 --out evals/try"
        ),
        "lightning-rl view evals/try",
    ]
