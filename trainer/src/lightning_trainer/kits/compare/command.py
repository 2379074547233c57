"""`lightning-rl compare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import merge
from lightning_trainer.flags.common import GroupedCommand, config_options, given, print_json, read_key, screen
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.intervals import Estimate
    from lightning_trainer.kits.compare.compare import Comparison
    from lightning_trainer.kits.compare.config import CompareConfig
    from lightning_trainer.kits.evaluation.summary import Summary

LEFT_OUT = frozenset(
    {
        "target",
        "steps",
        "epochs",
        "resume",
        "out",
        "val_every",
        "val_samples",
        "keep",
        "checkpoint",
        "store",
        "port",
    }
)  # fmt: skip - the budget says how long, and the comparison what is kept


@click.command(name="compare", cls=GroupedCommand)
@click.argument("target", required=False)
@click.option("--budget", type=click.IntRange(1), help="Maximum rollouts on training tasks, per method.")
@click.option(
    "--methods",
    metavar="NAME,...",
    help="Methods: rl (training), sft (rejection sampling), prompts (needs --reflect). [default:"
    " rl,sft; with --reflect also prompts]",
)
@click.option("--samples", type=click.IntRange(1), help="Rollouts per held-out task. [default: 4]")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of rejection sampling. [default: 2]")
@click.option(
    "--sft", multiple=True, metavar="NAME=VALUE", help="Option of sft --rounds, such as learning_rate. May be repeated."
)
@click.option("--reflect", metavar="[MODEL=]URL", help="OpenAI-compatible server that proposes prompts.")
@click.option(
    "--reflect-key",
    type=click.Path(path_type=Path),
    help="File with the key of --reflect. Default: LIGHTNING_REFLECT_KEY.",
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with options of train as keys.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the comparison. Default: comparisons/DATE.")
@click.option("--resume", type=click.Path(path_type=Path), help="Resume the comparison in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options(leave_out=LEFT_OUT)
def command(*, resume: Path | None, out: Path | None, reflect_key: Path | None, as_json: bool, **flags: Any) -> None:
    """Compare methods of improving the agents of the program TARGET (module:function). The program is not changed.

    Each method uses the same budget of rollouts on --data, then its result is evaluated on the held-out tasks of --val.
    One table shows the reward of each method with its confidence interval, and the cost. Finished methods are saved,
    and --resume runs the others.
    """
    from lightning_trainer.kits.compare.compare import compare
    from lightning_trainer.report.progress import Shown

    config = _config(resume, reflect_key, given(flags if resume is None else {**flags, "out": out}))
    with Shown(f"comparing {', '.join(config.methods)} for {config.train.target or config.train.command}") as progress:
        found = compare(config, progress, out=out, resume=resume)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


def _config(resume: Path | None, reflect_key: Path | None, flags: dict[str, Any]) -> CompareConfig:
    from lightning_trainer.kits.compare.config import METHODS, CompareConfig, read
    from lightning_trainer.kits.prompts.reflection import read_reflection

    if resume is not None:
        if flags:
            wrong = ", ".join("TARGET" if name == "target" else f"--{name.replace('_', '-')}" for name in flags)
            raise ConfigError(f"a resumed comparison keeps its options: leave out {wrong}.")
        return read(resume, read_key(reflect_key) if reflect_key else os.environ.get("LIGHTNING_REFLECT_KEY"))
    file, reflect, methods = flags.pop("file", None), flags.pop("reflect", None), flags.pop("methods", None)
    own = {name: flags.pop(name) for name in ("budget", "samples", "rounds", "sft") if name in flags}
    if "budget" not in own:
        raise ConfigError("say how many rollouts each method may spend: --budget N.")
    named = tuple(name.strip() for name in methods.split(",") if name.strip()) if methods is not None else None
    return CompareConfig(
        train=merge(file, flags),
        methods=(METHODS if reflect else METHODS[:2]) if named is None else named,
        reflect=None if reflect is None else read_reflection(reflect, reflect_key),
        **own,
    )


def _show(found: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "reward", "95 %", "better by", "95 %", "rollouts", "tokens", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    _add(table, "as it is", found.base)
    for name, side in found.sides.items():
        took = (side.made.rollouts, side.made.tokens)
        cost = (*("-" if number is None else f"{number}" for number in took), f"{side.made.seconds:.0f}")
        if side.summary is None or side.better is None:
            table.add_row(Text(name), "-", "-", "-", "-", *cost)
        else:
            _add(table, name, side.summary, *_numbers(side.better), *cost)
    screen().print(table)
    for name, side in found.sides.items():
        if side.made.nothing is not None:
            click.echo(printable(f"{name} found nothing to learn: {side.made.nothing}", lines=True))
    summaries = {"as it is": found.base} | {name: s.summary for name, s in found.sides.items() if s.summary is not None}
    for name, summary in summaries.items():
        if summary.left_out:
            whole = summary.counted + summary.left_out
            click.echo(
                f"WARNING: {summary.left_out} of {whole} samples of {printable(name)} failed, not by the model,"
                " and are left out. --resume runs them again.", err=True,
            )  # fmt: skip
    agents = [name for name in found.base.by_agent if name]
    if len(agents) > 1:
        click.echo(printable("most held-out reward: " + ", ".join(f"{n} with {found.best_of(n)}" for n in agents)))
    tasks = f"{found.base.tasks} held-out tasks, {found.base.samples} samples of each; differences are paired by task"
    click.echo(f"{tasks}. Rollouts, tokens and seconds are what learning took.")
    if found.best is None:
        click.echo(f"With {found.budget} rollouts nothing is surely better than the model as it is.")
    else:
        made = found.sides[found.best].made
        click.echo(printable(f"{found.best} is best: {made.model or made.prompts}"))
    click.echo(f"all of it: {found.folder}")


def _add(table: Any, title: str, summary: Summary, *more: str) -> None:
    from rich.text import Text

    table.add_row(Text(title), *_numbers(summary.reward), *more)
    for name, agent in summary.by_agent.items():
        if len(summary.by_agent) > 1 and name:
            table.add_row(Text(f"  {printable(name)}", style="dim"), *_numbers(agent.reward))


def _numbers(found: Estimate) -> tuple[str, str]:
    mean = "-" if found.mean is None else decimal(found.mean)
    return mean, "-" if found.low is None or found.high is None else f"{decimal(found.low)} to {decimal(found.high)}"
