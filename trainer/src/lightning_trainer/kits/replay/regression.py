"""`replay_all()`: recorded attempts with new code or another model: which still succeed, and where they differ."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lightning_spans.errors import ConfigError, DataError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.spans import Json
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.gateway.replay.sessions import why_ended
from lightning_trainer.kits.forks.planning import RecordedAttempt, plan, recorded
from lightning_trainer.kits.replay.fields import ReplayFields
from lightning_trainer.kits.replay.forking import policy_agents
from lightning_trainer.kits.replay.running import (
    Program,
    from_run,
    open_replays,
    refuse_idle,
    refuse_judge,
    refuse_unseen,
)
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.scores import total
from lightning_trainer.run.interrupts import defer_interrupts
from lightning_trainer.session.session import open_database

if TYPE_CHECKING:
    from lightning_spans.store import Store
    from lightning_trainer.rl.rollouts import Outcome


class ReplayConfig(ReplayFields, CheckedRecord):
    """What is replayed, and with which program.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    program: Program = Field(default_factory=Program)
    """Program to run. Its subject, if there is one, answers all calls of its agents: another model is tried."""


@dataclass(frozen=True, slots=True)
class RecordReplay:
    """A record that was replayed.

    Attributes:
        name: the requested id.
        attempt_id: the replay; None if it could not begin.
        recorded: the recorded reward, without those of a judge; None if there was none.
        reward: the new reward; None if there is none.
        succeeds: whether it is a success.
        parted: the first request or tool that differed from the record; None if all were equal.
        reason: why it ended early, failed or could not begin; None if it did not.
    """

    name: str
    attempt_id: str | None = None
    recorded: float | None = None
    reward: float | None = None
    succeeds: bool = False
    parted: str | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the replay as a JSON object."""
        return {
            "rollout": self.name,
            "attempt_id": self.attempt_id,
            "recorded": self.recorded,
            "reward": self.reward,
            "succeeds": self.succeeds,
            "parted": self.parted,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Regression:
    """Results of all replays.

    Attributes:
        replayed: one result per record, in their order.
    """

    replayed: tuple[RecordReplay, ...]

    @property
    def succeeded(self) -> int:
        """Number of successful replays."""
        return sum(each.succeeds for each in self.replayed)

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl replay --json` prints."""
        return {
            "records": len(self.replayed),
            "succeed": self.succeeded,
            "as_recorded": sum(each.parted is None and each.reason is None for each in self.replayed),
            "replays": [each.to_json() for each in self.replayed],
        }


def replay_all(config: ReplayConfig, progress: Progress | None = None) -> Regression:
    """Run recorded attempts again with their tools' recorded results.

    Args:
        config: which attempts, and with which program.
        progress: callback for progress events. Default: none.

    Raises:
        LightningError: an option or a file is wrong.
    """
    progress = progress or Silent()
    tried = config.program.subject is not None
    program = from_run(config.program, config.store)
    refuse_judge(program)
    refuse_idle(config.program, config.program.subject)
    program = program if tried else replace(program, subject=None)  # the run's own model is not tried
    with open_database(config.store) as store, defer_interrupts(progress.stopping) as check:
        sources: dict[str, RecordedAttempt | str] = {
            name: _source(store, name, task) for name, task in _choose_attempts(config, store)
        }
        good = {name: source for name, source in sources.items() if isinstance(source, RecordedAttempt)}
        for source in good.values():
            refuse_unseen(program, source.record, allowed="*" in config.run_tools)
        agents = tuple(dict.fromkeys(agent for source in good.values() for agent in policy_agents(source.record)))
        agents = agents or tuple(sorted({n for s in good.values() for c in s.record.calls for n in c.agents}))
        made: dict[str, Rollout] = {}
        batch = f"replay-{uuid.uuid4().hex[:8]}"
        for number, (name, source) in enumerate(good.items()):
            asked = Replay(
                attempt_id=source.attempt_id,
                beyond="end" if config.stop else "sample",
                fresh=(program.agents or agents) if tried else (),
                run_tools=config.run_tools,
                tools="refuse",
            )
            try:
                (made[name],) = plan(source, name=f"{batch}-{number}", replay=asked, timeout_s=program.timeout_s)
            except ConfigError as error:
                sources[name] = str(error)
        found: dict[str, RecordReplay] = {}
        if made:
            needs = any(source.reward is not None for source in good.values())
            with open_replays(program, store, agents=agents, work=len(made), progress=progress, needs_reward=needs) as (
                session,
                _,
            ):
                outcomes = session.run(list(made.values()), progress, "replays", check=check)
                replays = session.app.state.replays
                parted = {a.attempt_id: replays.parted(a.attempt_id) for o in outcomes for a in o.attempts}
            for name, outcome in zip(made, outcomes, strict=True):
                found[name] = _compare_with_record(
                    store, name, good[name], outcome, parted=parted, success=config.success
                )
        return Regression(
            tuple(
                found[name] if name in found else RecordReplay(name, reason=str(source))
                for name, source in sources.items()
            )
        )


def _compare_with_record(
    store: Store,
    name: str,
    source: RecordedAttempt,
    outcome: Outcome,
    *,
    parted: Mapping[str, str | None],
    success: float | None,
) -> RecordReplay:
    then = source.reward
    last = outcome.attempts[-1] if outcome.attempts else None
    if last is None:
        return RecordReplay(name, recorded=then, reason=outcome.error)
    reason = why_ended(last, store.calls(attempt_ids=[last.attempt_id]))
    if reason is None and outcome.attempt is None:
        reason = (last.error or last.status).rpartition("\n")[2]
    now = total(outcome.rewards) if outcome.rewards else None
    least = then if success is None else success
    if reason is None and least is not None and now is None:
        reason = f"it got no reward, but a success needs {least:g} or more: give --reward module:function"
    good = outcome.attempt is not None and reason is None and (least is None or (now is not None and now >= least))
    return RecordReplay(name, last.attempt_id, then, now, good, parted.get(last.attempt_id), reason)


def _source(store: Store, name: str, task: Mapping[str, Json] | None) -> RecordedAttempt | str:
    try:
        if store.rollouts(rollout_ids=[name]):
            found = recorded(store, rollout_id=name)
        else:
            found = recorded(store, attempt_id=name)
    except ConfigError as error:
        return str(error)
    return found if task is None else replace(found, task=task)


def _choose_attempts(config: ReplayConfig, store: Store) -> Sequence[tuple[str, Mapping[str, Json] | None]]:
    """Return the ids to replay, each with the task that the file gives for it."""
    wanted: list[tuple[str, Mapping[str, Json] | None]] = [(name, None) for name in config.rollouts]
    if config.file is not None:
        try:
            lines = config.file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{config.file} can't be read: {error}.") from None
        wanted += [_line(config.file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not wanted:
        done = store.rollouts(status="succeeded")
        wanted = [(rollout.rollout_id, None) for rollout in done if rollout.replay is None]
    if not wanted:
        raise ConfigError(f"{config.store} has no rollout that succeeded. Name some: --rollouts FILE or --rollout ID.")
    return wanted


def _line(path: Path, number: int, line: str) -> tuple[str, Mapping[str, Json] | None]:
    text = line.strip()
    if not text.startswith("{"):
        return text.strip('"'), None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON: {error}.") from None
    name = next((values[key] for key in ("rollout_id", "attempt_id", "trace_id") if values.get(key)), None)
    task = values.get("task")
    if not isinstance(name, str) or not isinstance(task, dict | None):
        raise DataError(f"{path}, line {number}: give rollout_id, attempt_id or trace_id, and task where it is needed.")
    return name, task
