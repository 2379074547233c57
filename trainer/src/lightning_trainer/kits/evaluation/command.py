"""`lightning-rl eval`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_trainer.flags.answers import (
    answered_agents_option,
    endpoint_option,
    loading_options,
    max_tokens_option,
    model_option,
    name_by_option,
    server_key_option,
)
from lightning_trainer.flags.common import given_flags, print_json, read_key, screen
from lightning_trainer.flags.environment import environment_options, with_environment
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_option, out_option, resume_option, store_flag
from lightning_trainer.flags.program import (
    columns_option,
    concurrency_option,
    data_option,
    isolate_option,
    program_options,
    take_work,
    timeout_option,
    work_options,
    workers_option,
)
from lightning_trainer.kits.evaluation.fields import EvalFields
from lightning_trainer.options.limits import FailureOptions
from lightning_trainer.options.measuring import SuccessOptions
from lightning_trainer.options.record import split_names
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import decimal, printable, tokens

if TYPE_CHECKING:
    from lightning_trainer.intervals import Estimate
    from lightning_trainer.kits.evaluation.config import EvalConfig
    from lightning_trainer.kits.evaluation.evaluate import Evaluation
    from lightning_trainer.kits.evaluation.summary import Summary
    from lightning_trainer.rl.rollouts import Failed


@click.command(name="eval")
@click.argument("target", required=False)
@data_option()
@columns_option
@environment_options()
@field_option(EvalFields, "tasks")
@field_option(EvalFields, "samples")
@model_option("Model to evaluate", "Default: the program's own endpoints.")
@endpoint_option("to evaluate")
@server_key_option("endpoint", "LIGHTNING_UPSTREAM_KEY")
@field_option(EvalFields, "against", metavar="OTHER")
@click.option(
    "--against-key", type=click.Path(path_type=Path), help="File with the key of the server that --against names."
)
@field_option(EvalFields, "prompts")
@program_options(judge=True)
@work_options
@field_option(EvalFields, "judge", text="Option of the judge: endpoint, model, ... May be repeated.")
@answered_agents_option("Default: the agents of the run, otherwise all that have a name.")
@name_by_option
@field_option(SuccessOptions, "success", text="Minimum reward of a success, for pass@k and pass^k. [default: 1]")
@field_option(
    FailureOptions,
    "failed",
    text="Reward of a rollout that failed after a model had answered: a number, lowest or exclude. [default: lowest]",
)
@field_option(
    FailureOptions,
    "timeouts",
    text="Count rollouts that timed out after a model had answered as failures, or exclude them. [default: count]",
)
@field_option(EvalFields, "temperature")
@max_tokens_option
@field_option(
    EvalFields,
    "sampling",
    text="plain ignores top_p, top_k, min_p and penalties in requests, as in training; asked applies them.",
)
@field_option(EvalFields, "seed")
@timeout_option(" [default: 300]")
@field_option(
    EvalFields,
    "max_attempts",
    text="Attempts per rollout if it fails for a reason other than the model. [default: 2]",
)
@workers_option
@concurrency_option
@isolate_option
@loading_options
@out_option("Folder of the evaluation. Default: evals/DATE.")
@store_flag("Store for the traces. Default: SQLite in the folder. May be given again with --resume.")
@resume_option("Resume the evaluation in this folder.")
@json_option
def command(
    *,
    resume: Path | None,
    as_json: bool,
    endpoint_key: Path | None,
    against_key: Path | None,
    **flags: Any,
) -> None:
    """Evaluate the program TARGET (module:function) on tasks: mean reward with its interval, and pass@k, by agent.

    With --model or --endpoint, that model answers the agents' calls. Without them, the program calls its own endpoints.
    Rollouts are saved in the folder as they end, and --resume runs the missing ones. Intervals are 95 % confidence
    intervals of the mean over tasks.

    Exit status: 0 done, 2 wrong option or file, 3 every rollout failed, 130 stopped.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.kits.evaluation.config import BearerKeys
    from lightning_trainer.kits.evaluation.evaluate import evaluate
    from lightning_trainer.report.progress import ProgressDisplay

    config = read_config(resume, given_flags(flags))
    environment = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    keys = BearerKeys(
        endpoint=read_key(endpoint_key) if endpoint_key else environment,
        against=read_key(against_key) if against_key else environment if _same_server(config) else None,
    )
    for key in (keys.endpoint, keys.against):
        remember(key)
    with ProgressDisplay(f"evaluating {config.target or config.command}") as progress:
        result = evaluate(config, progress, resume=resume, keys=keys)
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
    if result.failure is not None:
        raise AgentFailedError(result.failure)


def read_config(resume: Path | None, flags: dict[str, Any]) -> EvalConfig:
    """Read the flags of `eval`, which other commands that run a program on tasks share.

    Raises:
        ConfigError: an option is missing, has a wrong value, or contradicts another one.
    """
    from lightning_trainer.config.passwords import hidden_options
    from lightning_trainer.kits.evaluation.config import EvalConfig
    from lightning_trainer.kits.evaluation.evaluate import config_to_resume
    from lightning_trainer.kits.evaluation.folder import read_options
    from lightning_trainer.kits.evaluation.summary import Counting
    from lightning_trainer.naming import parse_rules

    if resume is not None:
        store = flags.pop("store", None)  # not saved because its URL may contain a password
        again = {"command" if name == "program" else name: value for name, value in flags.items()}
        hidden = hidden_options(read_options(resume)["config"]) if again else []
        if wrong := [name for name in again if name not in hidden]:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong if name != "target") or "TARGET"
            raise ConfigError(f"a resumed evaluation keeps its options: leave out {named}.")
        config = config_to_resume(resume, {**again, "work": again})
        return config if store is None else config.with_values(store=store)
    flags = with_environment(flags)
    target, program = flags.get("target"), flags.pop("program", None)
    if (target is None) == (program is None):
        raise ConfigError("name the agent: a TARGET module:function, or --command, and one of them.")
    if flags.get("data") is None:
        raise ConfigError("give the tasks to run: --data FILE.")
    own = {name: flags.pop(name) for name in ("success", "timeouts") if name in flags}
    counting = Counting(failed=_parse_failed(flags.pop("failed", "lowest")), **own)
    loading = ("chat_template", "device", "dtype", "max_model_len", "system_messages", "tool_format")
    load = {name: flags.pop(name) for name in loading if name in flags}
    if load and (flags.get("endpoint") or flags.get("model") is None):
        raise ConfigError(
            f"{', '.join(load)}: only for weights that are loaded here. Give --model without --endpoint, or leave it"
            " out."
        )
    agents = flags.pop("agents", None)
    names = None if agents is None else split_names(agents)
    if names == ():
        raise ConfigError("--agents is empty. Name agents, or leave it out.")
    rules, work = flags.pop("name_by", ()), take_work(flags)
    parse_rules(rules)
    return EvalConfig(name_by=rules, work=work, command=program, counting=counting, agents=names, load=load, **flags)


def _parse_failed(text: str) -> Failed:
    if text in {"lowest", "exclude"}:
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--failed {text!r}: give a number, lowest or exclude.") from None


def _same_server(config: EvalConfig) -> bool:
    """Whether both sides are on one server and may share a key: no server gets the key of another."""
    from urllib.parse import urlsplit

    from lightning_trainer.outgoing import is_url

    other = (config.against or "").rpartition("=")[2]
    if config.endpoint is None or not (is_url(config.endpoint) and is_url(other)):  # refused later if it must be one
        return False
    return urlsplit(other).netloc == urlsplit(config.endpoint).netloc


def _show(result: Evaluation) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightning_trainer.report.agents import rewarded_but_silent

    table = Table("", "reward", "95 %", "calls", "tokens in", "out", "tools", "errors")
    for column in table.columns[1:]:
        column.justify = "right"
    summaries = [(_short(result.name), result.summary)]
    if result.against is not None and result.against_name is not None:
        summaries.append((_short(result.against_name), result.against))
    for title, summary in summaries:
        rows = [(title, summary.reward, summary.usage)]
        rows += [(f"  {name or '(no name)'}", agent.reward, agent.usage) for name, agent in summary.by_agent.items()]
        for name, reward, usage in rows:
            read, drawn = tokens(usage.prompt_tokens), tokens(usage.response_tokens)
            counts = (str(usage.calls), read, drawn, str(usage.tool_calls), str(usage.failed_calls + usage.tool_errors))
            table.add_row(Text(printable(name)), *_numbers(reward), *counts)
    screen().print(table)
    for title, summary in summaries:
        click.echo(printable(f"{title}: {_in_words(summary)}"))
        for name, (text, share) in summary.most_frequent.items():
            answers = summary.by_agent[name].usage.answers
            if round(share * answers) == 1 < answers:
                continue  # no answer occurred twice
            click.echo(
                printable(f"  {name or '(no name)'}: {round(share * answers)} of {answers} answers are {text!r}")
            )
    agents = result.summary.by_agent
    rewarded = {name for name, agent in agents.items() if agent.by_task and not agent.usage.calls}
    warning = rewarded_but_silent(rewarded, {name for name, agent in agents.items() if agent.usage.calls})
    if warning is not None:
        click.echo(printable(warning), err=True)
    if result.against is not None:
        from lightning_trainer.kits.evaluation.summary import difference, differences_by_agent

        by_agent = differences_by_agent(result.summary, result.against)
        for name, (found, tasks) in {"": difference(result.summary, result.against), **by_agent}.items():
            mean, interval = _numbers(found)
            of = f" of {name}" if name else ""
            click.echo(printable(f"difference{of}, paired over {amount(tasks, 'task')}: {mean} ({interval})"))
    click.echo(f"{result.seconds:.1f} s; samples and traces: {result.folder}")


def _short(name: str) -> str:
    """Return a model's name; a path in the current folder without that folder."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def _left_out(summary: Summary) -> str:
    from lightning_trainer.rl.endings import Ending

    kinds = [f"{count} {Ending.from_slug(slug).text}" for slug, count in summary.left_out_by.items()]
    return ", ".join(kinds) or "failed"


def _numbers(found: Estimate) -> tuple[str, str]:
    mean = "-" if found.mean is None else decimal(found.mean)
    return mean, "-" if found.low is None or found.high is None else f"{decimal(found.low)} to {decimal(found.high)}"


def _in_words(summary: Summary) -> str:
    k = summary.samples
    drawn = summary.counted + summary.left_out + (summary.crashed if summary.failed_reward is None else 0)
    text = f"{amount(summary.tasks, 'task')}, {amount(k, 'sample')} of each"
    if drawn > summary.tasks * k:  # some lines of the file are equal
        text = f"{amount(summary.tasks, 'different task')}, {amount(drawn, 'sample')}"
    if k in summary.pass_at:
        text += f"; pass@{k} {summary.pass_at[k]:.3f}, pass^{k} {summary.pass_all[k]:.3f}"
    if k > 1 and 1 in summary.pass_at:
        text += f", pass@1 {summary.pass_at[1]:.3f}"
    if summary.crashed:
        counts = "left out" if summary.failed_reward is None else f"counted as {summary.failed_reward:g}"
        text += f"; {summary.crashed} failed after a model's answer ({summary.timed_out} too slow), {counts}"
    if summary.left_out:
        text += f"; {summary.left_out} do not count ({_left_out(summary)}), --resume tries them again"
    return f"{text}; {summary.sample_seconds:.1f} s a sample"
