"""`lightning-rl eval`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_trainer.cli.options import given, name_by_option, print_json, read_key, screen, take_work, work_options
from lightning_trainer.cli.training.environments import environment_options, with_environment
from lightning_trainer.report.terminal import decimal, printable, tokens

if TYPE_CHECKING:
    from lightning_trainer.evaluation.config import EvalConfig
    from lightning_trainer.evaluation.evaluate import Evaluation
    from lightning_trainer.evaluation.summary import Summary
    from lightning_trainer.intervals import Estimate
    from lightning_trainer.rl.rollouts import Failed


@click.command(name="eval")
@click.argument("target", required=False)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Tasks: a JSON Lines, JSON, CSV or Parquet file, a pattern of such, or a data set's folder.",
)
@environment_options()
@click.option("--tasks", type=click.IntRange(1), help="Only the first N of them.")
@click.option("--samples", type=click.IntRange(1), help="Executions of each task. [default: 1]")
@click.option("--model", help="What answers: a run, checkpoint or model folder, or a model's name. Or see --endpoint.")
@click.option(
    "--endpoint", metavar="URL", help="An OpenAI-compatible server answers; --model then names what it is asked for."
)
@click.option("--endpoint-key", type=click.Path(path_type=Path), help="File with its key; else LIGHTNING_UPSTREAM_KEY.")
@click.option(
    "--against",
    metavar="OTHER",
    help="Compare, task by task, with an evaluation's folder, a run, a model, a URL or MODEL=URL.",
)
@click.option("--against-key", type=click.Path(path_type=Path), help="File with the key of --against URL.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="File of lightning-rl prompts: its system prompts stand in the place of the agents' own. Not for --against.",
)
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result), or judge.")
@work_options
@click.option("--judge", multiple=True, metavar="NAME=VALUE", help="Option of the judge: endpoint, model, ... Repeat.")
@click.option("--agents", metavar="NAME,...", help="Agents that are answered; those of the run, else all with a name.")
@name_by_option
@click.option("--success", type=float, help="Least reward that is a success, for pass@k and pass^k. [default: 1]")
@click.option(
    "--failed", help="Reward of a failure after a model's answer: a number, lowest or exclude. [default: lowest]"
)
@click.option(
    "--timeouts",
    type=click.Choice(["count", "exclude"]),
    help="Whether samples that were too slow after a model's answer count as failed. [default: count]",
)
@click.option("--temperature", type=click.FloatRange(0), help="Forced on the calls; as asked by default.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer whose request names no limit.")
@click.option(
    "--sampling", type=click.Choice(["plain", "asked"]), help="plain leaves top_p and the like out, as training does."
)
@click.option("--seed", type=click.IntRange(0), help="Of the draws; 0 for weights loaded here, none for endpoints.")
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), help="Time limit of an attempt. [default: 300]")
@click.option("--max-attempts", type=click.IntRange(1), help="Tries of what failed by no fault of the model's.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes; one a core by default.")
@click.option("--concurrency", type=click.IntRange(1), help="Samples at once in each. [default: 16]")
@click.option("--chat-template", help="Jinja file instead of the tokenizer's chat template, or hermes for ours.")
@click.option("--tool-format", help="How the model writes tool calls; as its run or its chat template does by default.")
@click.option("--device", help="auto, cpu, cuda, ...")
@click.option("--dtype", help="auto, float32 or bfloat16.")
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    help="Most tokens of prompt and answer together; by default as its run, else its model.",
)
@click.option("--out", type=click.Path(path_type=Path), help="The evaluation's folder; evals/DATE by default.")
@click.option(
    "--store", metavar="URL", help="Where traces are kept; SQLite in the folder by default. May be given again."
)
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with the evaluation in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    resume: Path | None,
    as_json: bool,
    endpoint_key: Path | None,
    against_key: Path | None,
    **flags: Any,
) -> None:
    """Measure the program TARGET (module:function) on tasks: mean reward with its interval, pass@k, by agent.

    A model that is named answers its agents' calls; without one the program is measured as it is, at its own
    endpoints. Samples are kept in the folder as they end, and --resume draws what is missing. Intervals are 95 %
    intervals of the mean over tasks.

    Exit status: 0 done, 2 an option or a file is wrong, 3 every sample failed, 130 stopped.
    """
    from lightning_trainer.evaluation.config import BearerKeys
    from lightning_trainer.evaluation.evaluate import evaluate
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.report.progress import Shown

    config = _config(resume, given(flags))
    environment = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    keys = BearerKeys(
        endpoint=read_key(endpoint_key) if endpoint_key else environment,
        against=read_key(against_key) if against_key else environment if _same_server(config) else None,
    )
    for key in (keys.endpoint, keys.against):
        remember(key)
    with Shown(f"evaluating {config.target or config.command}") as progress:
        result = evaluate(config, progress, resume=resume, keys=keys)
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
    if result.failure is not None:
        raise AgentFailedError(result.failure)


def _config(resume: Path | None, flags: dict[str, Any]) -> EvalConfig:
    from lightning_trainer.evaluation.config import EvalConfig
    from lightning_trainer.evaluation.evaluate import resumed
    from lightning_trainer.evaluation.summary import Counting
    from lightning_trainer.naming import parse_rules

    if resume is not None:
        store = flags.pop("store", None)  # a password in its address is not kept
        if flags:
            wrong = ", ".join(f"--{name.replace('_', '-')}" for name in flags if name != "target") or "TARGET"
            raise ConfigError(f"an evaluation that goes on has the options that it began with: leave out {wrong}.")
        return resumed(resume) if store is None else replace(resumed(resume), store=store)
    flags = with_environment(flags)
    target, program = flags.get("target"), flags.pop("program", None)
    if (target is None) == (program is None):
        raise ConfigError("name the agent: a TARGET module:function, or --command, and one of them.")
    if flags.get("data") is None:
        raise ConfigError("give the tasks to run: --data FILE.")
    own = {name: flags.pop(name) for name in ("success", "timeouts") if name in flags}
    counting = Counting(failed=_failed(flags.pop("failed", "lowest")), **own)
    loading = ("chat_template", "device", "dtype", "max_model_len", "tool_format")
    load = {name: flags.pop(name) for name in loading if name in flags}
    if load and (flags.get("endpoint") or flags.get("model") is None):
        raise ConfigError(f"{', '.join(load)}: of weights that are loaded here. Give --model alone, or leave it out.")
    agents = flags.pop("agents", None)
    names = None if agents is None else tuple(name.strip() for name in agents.split(",") if name.strip())
    if names == ():
        raise ConfigError("--agents is empty. Name agents, or leave it out.")
    rules, work = flags.pop("name_by", ()), take_work(flags)
    parse_rules(rules)
    return EvalConfig(name_by=rules, work=work, command=program, counting=counting, agents=names, load=load, **flags)


def _failed(text: str) -> Failed:
    if text in {"lowest", "exclude"}:
        return text  # type: ignore[return-value]
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--failed {text!r}: give a number, lowest or exclude.") from None


def _same_server(config: EvalConfig) -> bool:
    """Whether both sides are one server's, so that one key is for both: no server is sent another's."""
    from urllib.parse import urlsplit

    other = (config.against or "").rpartition("=")[2]
    return config.endpoint is not None and urlsplit(other).netloc == urlsplit(config.endpoint).netloc


def _show(result: Evaluation) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "reward", "95 %", "calls", "tokens in", "out", "tools", "errors")
    for column in table.columns[1:]:
        column.justify = "right"
    summaries = [(result.name, result.summary)]
    if result.against is not None and result.against_name is not None:
        summaries.append((result.against_name, result.against))
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
            click.echo(printable(f"  {name or '(no name)'}: {share:.0%} of its answers are {text!r}"))
    if result.against is not None:
        from lightning_trainer.evaluation.summary import difference, differences_by_agent

        by_agent = differences_by_agent(result.summary, result.against)
        for name, (found, tasks) in {"": difference(result.summary, result.against), **by_agent}.items():
            mean, interval = _numbers(found)
            of = f" of {name}" if name else ""
            click.echo(printable(f"difference{of}, paired over {tasks} tasks: {mean} ({interval})"))
    click.echo(f"{result.seconds:.1f} s; samples and traces: {result.folder}")


def _left_out(summary: Summary) -> str:
    from lightning_trainer.rl.endings import Ending

    kinds = [f"{count} {Ending.from_slug(slug).text}" for slug, count in summary.left_out_by.items()]
    return ", ".join(kinds) or "failed"


def _numbers(found: Estimate) -> tuple[str, str]:
    mean = "-" if found.mean is None else decimal(found.mean)
    return mean, "-" if found.low is None or found.high is None else f"{decimal(found.low)} to {decimal(found.high)}"


def _in_words(summary: Summary) -> str:
    k = summary.samples
    text = f"{summary.tasks} tasks, {k} samples of each"
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
