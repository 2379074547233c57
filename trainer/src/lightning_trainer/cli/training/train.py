"""`lightning-rl train`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import merge, read_toml
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.flags.common import GroupedCommand, config_options, given_flags, print_json
from lightning_trainer.flags.files import config_file_option, dry_run_flag, json_flag
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.progress import Progress
from lightning_trainer.report.terminal import decimal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_trainer.run.result import Result

EXAMPLE = (
    "lightning-rl train my_app:run --data train.jsonl --val dev.jsonl --agents writer --model smollm2-135m --steps 20"
)


@click.command(name="train", cls=GroupedCommand)
@click.argument("target", required=False)
@config_file_option("these options as keys, with _ instead of -. Options on the command line take precedence")
@dry_run_flag(
    "Run the rollouts of one step and an update that is discarded. Prints the expected time,"
    " memory and disk space of a run, whether there is something to learn, and a forecast for"
    " GPUs. With verl: prints its configuration and requirements, and starts nothing."
)
@click.option(
    "--gpu-memory",
    type=click.FloatRange(min=1),
    metavar="GB",
    help="With --dry-run: plan for GPUs with this much memory, such as 24 or 80, instead of this machine's. Prints"
    " whether the run fits on them and what to change if it does not. Loads and runs nothing.",
)
@json_flag("With --dry-run: print one JSON object as the last line.")
@click.option(
    "--view", "viewed", is_flag=True, help="Show the run in a web page while it trains, as lightning-rl view does."
)
@config_options(leave_out=frozenset({"target"}))
def command(
    *,
    target: str | None,
    file: Path | None,
    dry_run: bool,
    gpu_memory: float | None,
    as_json: bool,
    viewed: bool,
    **flags: Any,
) -> None:
    """Train the agents that you name in the program TARGET (module:function), which is called as run(task).

    The program returns the reward: a number, or numbers by agent name. The last line on stdout is JSON with the rewards
    before and after training, their confidence intervals, the run's folder and its checkpoint.

    Exit status: 0 done, 2 wrong option or file, 3 the agent failed, 4 nothing to learn, 5 max_cost reached, 130
    stopped.
    """
    from lightning_trainer.cli.training.viewed import ViewerProgress, with_folder
    from lightning_trainer.report.progress import ProgressDisplay
    from lightning_trainer.run.train import describe, train

    config = _config(file, {**given_flags(flags), **({"target": target} if target else {})})
    if gpu_memory and not dry_run:
        raise ConfigError("--gpu-memory plans for a GPU that is not here. Add --dry-run.")
    if dry_run:
        with ProgressDisplay(_title(config, "trying")) as shown, _planning(config, gpu_memory):
            described = describe(config, shown)
        click.echo(described.text)
        if as_json:
            print_json(described.facts)
        return
    with ExitStack() as stack:
        watched: Progress = stack.enter_context(ProgressDisplay(_title(config)))
        if viewed:
            config = with_folder(config)
            watched = stack.enter_context(ViewerProgress(watched, config.resume or config.out))
        result = train(config, watched)
    _print_sentences(result, config.agents)
    print_json(_facts(result))


def _planning(config: TrainConfig, memory: float | None) -> AbstractContextManager[None]:
    """Plan for GPUs with so many GB, as many as the options name; None: for this machine's."""
    from lightning_trainer.engines.devices import plan_for

    if memory is None:
        return nullcontext()
    named = [int(number) + 1 for number in (config.engine_gpus or "").split(",") if number.isdigit()]
    return plan_for(memory, max([config.gpus, *named]))


def _print_sentences(result: Result, agents: Sequence[str] | None) -> None:
    """Print the results for people, on stderr. `agents` names the trained ones; None: all are."""
    from lightning_trainer.rl.scores import trained_names

    if result.checkpoint is not None:
        click.echo(f"curve: {result.folder / 'curve.png'}\nserve it: lightning-rl serve {result.folder}", err=True)
    for name, told in zip(("before", "after"), result.scores(), strict=True):
        if told["mean"] is None:
            click.echo(f"{name}: unknown ({told['of']})", err=True)
        else:
            mean, low, high = (decimal(told[key]) for key in ("mean", "low", "high"))
            click.echo(
                f"{name}: {mean} ({low} to {high}, 95 %) on {amount(told['tasks'], 'task')},"
                f" {amount(told['rollouts'], 'rollout')}: {told['of']}",
                err=True,
            )
    if (sentence := result.sentence()) is not None:
        click.echo(sentence, err=True)
    for text in result.returned_last():
        click.echo(text, err=True)
    differences = result.differences()
    trained = trained_names(filter(None, differences), agents)
    for name, (rise, tasks) in differences.items():
        if name and rise.mean is not None and rise.low is not None and rise.high is not None:
            untrained = "" if trained is None or name in trained else ", not trained"
            ends = f"{decimal(rise.low)} to {decimal(rise.high)}, 95 %"
            click.echo(
                f"difference of {name}{untrained}: {rise.mean:+.3f} ({ends}), paired over {amount(tasks, 'task')}",
                err=True,
            )


def _facts(result: Result) -> dict[str, Any]:
    """Return the last line of output, which is JSON."""
    from lightning_trainer.intervals import Estimate

    before, after = result.scores()
    agents_before, agents_after = result.by_agent()
    found = result.differences()
    rise, tasks = found.pop("", (Estimate(None), 0))
    return {
        "reward_before": result.reward_before,
        "reward_after": result.reward_after,
        "before": before,
        "after": after,
        "difference": rise.mean,
        "difference_low": rise.low,
        "difference_high": rise.high,
        "difference_tasks": tasks,
        "by_agent": {
            name: {"difference": its.mean, "low": its.low, "high": its.high, "n": n} for name, (its, n) in found.items()
        },
        "best_step": result.best_step,
        "by_agent_before": agents_before,
        "by_agent_after": agents_after,
        "steps": result.steps,
        "alarms": [{"name": alarm.name, "after_steps": alarm.step, "text": alarm.text} for alarm in result.alarms],
        "rollbacks": [asdict(rollback) for rollback in result.rollbacks],
        "folder": str(result.folder),
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "checkpoint_best": str(result.best) if result.best else None,
        "seconds": round(result.seconds, 1),
    }


def _config(file: Path | None, flags: dict[str, Any]) -> TrainConfig:
    """Merge the options: flags override the file, which overrides the options of a resumed run."""
    resume = flags.get("resume") or (read_toml(file).get("resume") if file is not None else None)
    if not resume or not isinstance(resume, (str, Path)):
        return merge(file, flags)
    from lightning_trainer.run.folders import read_config

    return merge(file, flags, base=read_config(Path(resume)))


def _title(config: TrainConfig, what: str = "training") -> str:
    agents = "all agents" if config.agents is None else ", ".join(config.agents)
    return f"{what} {agents} of {config.env or config.target or config.command} from {config.model}"


command.example = EXAMPLE
