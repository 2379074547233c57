"""`lightning-rl agents`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import LightningError, NothingToLearnError, RewardError
from lightning_spans.schema.agents import check_known
from lightning_trainer.cli.training.agent_rows import print_joins, print_rows
from lightning_trainer.cli.training.trial import Trial, run_trial, tell_errors
from lightning_trainer.flags.answers import agents_flag, endpoint_option, model_flag, name_by_option
from lightning_trainer.flags.common import given_flags, reading, rewards_option
from lightning_trainer.flags.environment import environment_options, with_environment
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_flag, key_file_option, store_option
from lightning_trainer.flags.program import (
    columns_option,
    data_option,
    isolate_option,
    program_options,
    take_work,
    work_options,
)
from lightning_trainer.options.limits import LimitOptions
from lightning_trainer.options.record import split_names
from lightning_trainer.options.sampling import AnswerOptions, SampleOptions
from lightning_trainer.options.tasks import CountOptions

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.session.answers import Subject


_ALWAYS: Final = ("timeout_s", "columns")  # options that are allowed when no program runs


@click.command(name="agents")
@click.argument("target", required=False)
@data_option()
@columns_option
@environment_options(tasks=False)
@field_option(CountOptions, "tasks", dest="count", text="Run the first N tasks.", default=4, show_default=True)
@program_options()
@isolate_option
@work_options
@name_by_option
@agents_flag("Agents that you intend to train.", dest="names")
@model_flag(
    "Model that answers those agents (without --agents: all agents that have a name): a model"
    " folder, hub id, run or checkpoint. Default: the program's own endpoints."
)
@endpoint_option(
    "that answers those agents",
    "Its key: LIGHTNING_UPSTREAM_KEY, or OPENAI_API_KEY if the URL equals OPENAI_BASE_URL.",
)
@field_option(
    AnswerOptions,
    "max_tokens",
    text="With --model: maximum tokens of an answer if the request sets no limit.",
)
@field_option(SampleOptions, "temperature", text="With --model: sampling temperature, as in train.")
@field_option(
    SampleOptions,
    "sampling",
    text="With --model: plain ignores top_p, top_k, min_p and penalties in requests, as in train;"
    " asked applies them. [default: plain]",
)
@field_option(LimitOptions, "timeout_s", text="Time limit of a task, in seconds.", filled=True)
@json_flag("Print one JSON object per agent.")
@rewards_option
@store_option
@key_file_option
def command(
    *,
    count: int,
    names: str | None,
    as_json: bool,
    automatic: tuple[str, ...],
    store: str,
    key_file: Path | None,
    **flags: Any,
) -> None:
    """List the agents of the program TARGET (module:function), run on a few tasks, or the agents in a store.

    By default, model calls go to the program's own endpoints. With --model or --endpoint they go through a local
    gateway, which also records the calls of a --command. --model samples as in training. Traces are saved in the store;
    `lightning-rl traces` shows them.

    Exit status: 0 done, 2 wrong option or file, 3 the agent failed, 4 no task got a reward.
    """
    from lightning_trainer.report.agents import explain_no_rewards, overview
    from lightning_trainer.rl.rewards.judge import read_rules
    from lightning_trainer.rl.rewards.shown import with_automatic

    rules = read_rules(given_flags({"rewards": automatic}).get("rewards", {}))
    chosen = split_names(names) if names else None
    flags = _open_environment(flags, count)
    runs = bool(flags["target"] or flags["program"])
    if runs:
        traces, reward_error = run_trial(_read_trial(flags, chosen, count), store)
    else:
        _refuse_program_options({name: value for name, value in flags.items() if name not in _ALWAYS})
        traces, reward_error = _read_traces(store, key_file), None
    rows = overview(with_automatic(traces, rules), chosen, reward_error=reward_error)
    if not rows:
        raise LightningError("no model call was captured in this store. Run the agent with attach(), or name a TARGET.")
    if chosen is not None:
        paths = {path for trace in traces for path in trace.agent_paths}
        check_known(chosen, {*paths, *(row.agent for row in rows if row.agent is not None)})
    print_rows(rows, as_json=as_json)
    print_joins(traces, as_json=as_json)
    if reward_error is not None:
        raise RewardError(reward_error)
    if (advice := explain_no_rewards(traces)) is not None:
        if runs:
            raise NothingToLearnError(advice)
        click.echo(advice, err=True)


def _open_environment(flags: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the flags with the target and the tasks of the environment, if one is named."""
    named = given_flags({name: flags.pop(name) for name in ("env", "env_options")})
    if not named:
        return flags
    program = given_flags({name: flags[name] for name in ("target", "program", "data")})
    answers = {name: flags[name] for name in ("model", "endpoint")}
    opened = with_environment({**program, **named, **answers, "env_tasks": count})
    return {**flags, "target": opened["target"], "data": opened["data"]}


def _read_trial(flags: dict[str, Any], chosen: tuple[str, ...] | None, count: int) -> Trial:
    """Read the program, its tasks, and the model for its calls.

    Raises:
        LightningError: an option is missing, has a wrong value, or contradicts another.
    """
    from lightning_trainer.run.data import load_tasks
    from lightning_trainer.runner.target import JUDGE, Job
    from lightning_trainer.session.answers import OF_CALLS, name_rules, refuse_unheard
    from lightning_trainer.session.sampling import SamplingOptions

    target, program, reward = flags["target"], flags["program"], flags["reward"]
    if target and program:
        raise LightningError("TARGET and --command both name an agent. Give one of them.")
    if reward == JUDGE:
        raise LightningError(
            "--reward judge compares rollouts of one task, and each task runs once here. `lightning-rl eval"
            " --reward judge` shows what a judge gives; leave out --reward to see the agents."
        )
    if flags["data"] is None:
        raise LightningError("give the tasks to run: --data FILE.")
    subject = _subject(flags["model"], flags["endpoint"])
    refuse_unheard(given_flags({name: flags[name] for name in OF_CALLS}), subject)
    work, isolate = take_work(flags), bool(flags["isolate"])
    job = Job(target=target, command=program, reward=reward, needs_reward=False, work=work, isolate=isolate)
    return Trial(
        job=job,
        tasks=load_tasks(flags["data"], flags["columns"] or ())[:count],
        timeout_s=flags["timeout_s"],
        subject=subject,
        sampling=SamplingOptions(
            agents=chosen,
            temperature=flags["temperature"],
            plain=flags["sampling"] != "asked",
            max_tokens=flags["max_tokens"],
            name_by=flags["name_by"] or name_rules(subject),
        ),
    )


def _refuse_program_options(options: dict[str, Any]) -> None:
    """Reject options of a program that runs here if none is named.

    Raises:
        LightningError: names the options.
    """
    if names := [f"--{name.replace('_', '-')}" for name in given_flags(options)]:
        raise LightningError(
            f"{', '.join(names)} needs a program to run. Name the TARGET, and tasks with --data FILE; "
            "to see the agents of a store, leave these options out."
        )


def _read_traces(store: str, key_file: Path | None) -> list[Trace]:
    """Read the traces of a store, and report which attempts failed."""
    from lightning_spans.store.traces import traces_of

    with reading(store, key_file) as source:
        traces = traces_of(source)
        tell_errors([a.error for a in source.attempts() if a.error], len(traces), "attempts")
    return traces


def _subject(model: str | None, url: str | None) -> Subject:
    """Return what answers the calls: a server, a model, or if neither is given the agents' own endpoints."""
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.session.answers import AsItIs, endpoint, read_subject

    if url is None:
        return AsItIs() if model is None else read_subject(model)
    key = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    if key is None and url == os.environ.get("OPENAI_BASE_URL"):
        key = os.environ.get("OPENAI_API_KEY")
    remember(key)
    return endpoint(url, model=model, key=key)
