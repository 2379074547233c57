"""`lightning-rl loop`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import print_json
from lightning_trainer.flags.files import (
    config_file_option,
    dry_run_flag,
    json_option,
    key_file_option,
    out_option,
    store_option,
)
from lightning_trainer.report.terminal import printable

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig


@click.command(name="loop")
@click.argument("target", required=False)
@config_file_option("a table for each stage")
@out_option("Folder of the loop. Default: loops/AGENT.")
@click.option(
    "--rounds",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Number of rounds after which the command returns.",
)
@click.option(
    "--every",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Time between two checks of what a stage waits for.",
)
@click.option("--no-wait", is_flag=True, help="Return instead of waiting, for use from cron.")
@dry_run_flag("Print the stages of the next round and the cost of each, then stop.")
@click.option("--status", is_flag=True, help="Print the current stage, and stop.")
@store_option
@key_file_option
@json_option
def command(
    *,
    target: str | None,
    file: Path | None,
    out: Path | None,
    rounds: int,
    every: float,
    no_wait: bool,
    dry_run: bool,
    status: bool,
    store: str,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Improve an agent of the program TARGET (module:function) in rounds, from live traces to users.

    A round selects new live traces as tasks, trains, evaluates, names the candidate, and takes it through shadow and
    canary. Then it waits for a person's approval (`deploy approve`), and promotes. It ends early if the candidate is
    not good enough. Each stage is recorded in the folder, and the same command continues. See docs/how-to/loop.md.
    """
    from lightning_trainer.kits.loop.loop import LOOPS, LoopPace, loop
    from lightning_trainer.kits.loop.reading import read_loop
    from lightning_trainer.kits.loop.record import describe_loop
    from lightning_trainer.report.progress import ProgressDisplay

    if status and out is not None:
        click.echo(printable(describe_loop(out), lines=True), nl=False)
        return
    if file is None or target is None:
        raise ConfigError("give the program and its configuration: lightning-rl loop my_app:run --config loop.toml.")
    config = read_loop(file, target, store, key_file)
    folder = out or LOOPS / config.agent.replace("/", "_")
    if status:
        click.echo(printable(describe_loop(folder), lines=True), nl=False)
        return
    if dry_run:
        _show_costs(config, folder, as_json=as_json)
        return
    with ProgressDisplay(f"loop of {config.agent}") as progress:
        worked = loop(config, folder, LoopPace(rounds=rounds, every_s=None if no_wait else every), progress)
    ends = [(one.number, one.end) for one in worked]
    if as_json:
        found = [
            {"round": number, "outcome": end and end.outcome, "reason": "" if end is None else end.reason}
            for number, end in ends
        ]
        print_json({"folder": str(folder), "rounds": found})
    else:
        click.echo(printable(describe_loop(folder), lines=True), nl=False)


def _show_costs(config: LoopConfig, folder: Path, *, as_json: bool) -> None:
    from lightning_trainer.kits.loop.costs import cost_lines, forecast
    from lightning_trainer.kits.loop.methods.names import find_method

    found = forecast(config, folder)
    if as_json:
        print_json(found)
        return
    click.echo(printable("\n".join(cost_lines(found)), lines=True))
    if command := find_method(config.method).forecast_by:
        click.echo(f"Time and memory of the training: lightning-rl {command} --dry-run, with the same options.")
