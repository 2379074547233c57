"""`fork()`: what would have happened with one call of a recorded attempt changed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from lightning_spans.errors import ConfigError
from lightning_spans.schema.replays import Replay
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.gateway.replay.record import Record
from lightning_trainer.kits.forks.planning import RecordedAttempt, plan, recorded
from lightning_trainer.kits.forks.results import ForkResult, result
from lightning_trainer.kits.replay.fields import ForkFields
from lightning_trainer.kits.replay.running import (
    Program,
    from_run,
    open_replays,
    refuse_idle,
    refuse_judge,
    refuse_unseen,
)
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import load_tasks
from lightning_trainer.run.interrupts import defer_interrupts
from lightning_trainer.session.answers import Subject
from lightning_trainer.session.session import open_database


class ForkConfig(ForkFields, CheckedRecord):
    """Which call of which attempt is sampled again, and how.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    program: Program = Field(default_factory=Program)
    """Program to run, and the model of its calls."""
    instead: Subject | None = None
    """Model of the forked call. Default: the same as for the others."""
    coupled: bool = True
    """Whether, after the call, a request equal to a recorded one gets the recorded answer."""


@dataclass(frozen=True, slots=True)
class ForkedAttempt:
    """A fork, and the forked attempt.

    Attributes:
        recorded: the attempt.
        result: outcome of the fork; of a dry run, one continuation without sampling, or how it ended.
    """

    recorded: RecordedAttempt
    result: ForkResult


def fork(config: ForkConfig, progress: Progress | None = None) -> ForkedAttempt:
    """Run a program again up to a recorded call, sample that call again, and continue.

    Args:
        config: which call, and how.
        progress: callback for progress events. Default: none.

    Raises:
        LightningError: a fork is not possible, or an option is wrong.
    """
    progress = progress or Silent()
    if (config.rollout is None) == (config.attempt is None):
        raise ConfigError("name the rollout or the attempt to fork: either --rollout ID or --attempt ID.")
    if config.call is None and not config.dry_run:
        raise ConfigError("name the call to sample again: --call N, from 0, as `lightning-rl traces` lists them.")
    if config.say is not None and config.instead is not None:
        raise ConfigError("the forked call is answered by --with or by --say, not by both.")
    if config.dry_run and (config.say is not None or config.instead is not None):
        raise ConfigError("a dry run samples nothing: leave out --with and --say.")
    program = from_run(config.program, config.store)
    if not config.dry_run:
        refuse_judge(program)
        refuse_idle(config.program, program.subject, config.instead)
    with open_database(config.store) as store, defer_interrupts(progress.stopping) as check:
        source = recorded(store, rollout_id=config.rollout, attempt_id=config.attempt)
        _check_data(config, source)
        replay = Replay(
            attempt_id=source.attempt_id,
            call=None if config.dry_run else config.call,
            coupled=config.coupled,
            tools=config.tools,
            run_tools=config.run_tools,
            refuse_tools=config.refuse_tools,
            say=config.say,
        )
        if config.dry_run and config.call is not None and config.call >= len(source.record.calls):
            plan(source, name="check", replay=replace(replay, call=config.call), tokens=False)  # raises the error
        refuse_unseen(program, source.record, allowed=config.tools == "run" or "*" in config.run_tools)
        name = f"fork-{uuid.uuid4().hex[:8]}"
        made = plan(source, name=name, replay=replay, times=1 if config.dry_run else config.times, tokens=False)
        _check_answers(config, program, source)
        if config.dry_run:
            program = replace(program, subject=None)
        agents = policy_agents(source.record)
        with open_replays(program, store, agents=agents, work=len(made), progress=progress, instead=config.instead) as (
            session,
            model,
        ):
            made = [
                replace(
                    one,
                    replay=replace(one.replay, model=model) if one.replay is not None else None,
                    timeout_s=program.timeout_s or one.timeout_s,
                )
                for one in made
            ]
            outcomes = session.run(made, progress, "continuations", check=check)
        return ForkedAttempt(source, result(store, source, outcomes))


def policy_agents(record: Record) -> tuple[str, ...]:
    """Return the names of the agents whose calls a gateway's policy answered."""
    found = dict.fromkeys(call.agent for call in record.calls if call.node.call is not None and call.agent is not None)
    return tuple(found)


def _check_answers(config: ForkConfig, program: Program, source: RecordedAttempt) -> None:
    """Reject a fork whose call no given model can answer exactly.

    Raises:
        ConfigError: the message says which option to give.
    """
    if config.call is None or config.dry_run:
        return
    call = source.record.calls[config.call]
    who = f"call {config.call} ({call.agent or 'no agent'})"
    gateway = call.node.call is not None and call.node.answer.prompt_token_ids is not None
    elsewhere = config.instead is not None or config.say is not None
    if gateway and program.subject is None and not elsewhere:
        raise ConfigError(f"{who} was answered by a policy. Choose the model to use: --model M or --endpoint URL.")
    trained = program.agents is None or call.agent is None or _is_selected(program.agents, call.agent)
    if program.subject is not None and not gateway and trained and not elsewhere and program.agents is not None:
        raise ConfigError(
            f"{who} "
            "has no recorded tokens, because its own endpoint answered it. No model could continue it exactly. Leave"
            f" {call.agent or 'it'} out of --agents, or replace its answer with --with or --say."
        )


def _is_selected(patterns: Sequence[str], agent: str) -> bool:
    from lightning_spans.schema.agents import selects

    return selects(patterns, agent)


def _check_data(config: ForkConfig, source: RecordedAttempt) -> None:
    if config.data is not None and dict(source.task or {}) not in load_tasks(config.data):
        raise ConfigError(
            f"the task of attempt {source.attempt_id} is not in {config.data}: the data set has changed since. Give the"
            " data it was recorded with, or leave --data out: the recorded task is what runs."
        )
