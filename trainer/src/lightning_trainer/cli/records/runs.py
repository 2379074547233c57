"""`lightning-rl runs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightning_trainer.flags.common import print_json, screen
from lightning_trainer.flags.files import json_flag

if TYPE_CHECKING:
    from lightning_trainer.report.runs import RunSummary


@click.command(name="runs")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@json_flag("Print one JSON object per run, and one with the differences.")
def command(*, folders: Sequence[Path], as_json: bool) -> None:
    """List runs and compare them: rewards, curves, cost, and the options that differ.

    FOLDERS are runs, or folders that contain runs. Default: runs/.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.report.runs import differences, find, row_of
    from lightning_trainer.run.folders import RUNS

    places = list(folders) or [RUNS]
    missing = [str(place) for place in places if not place.is_dir()]
    rows = [row_of(path) for path in find(places)]
    if missing or not rows:
        raise ConfigError(f"there is no run in {', '.join(missing or map(str, places))}. Name the folder of a run.")
    differ = differences(rows)
    if as_json:
        for row in rows:
            print_json(row.to_json())
        print_json({"differ": differ})
        return
    _print(rows)
    for name, values in differ.items():
        click.echo(f"{name}: {', '.join(map(str, values))}")


def _interval(mean: float | None, low: float | None, high: float | None) -> str:
    from lightning_trainer.report.terminal import decimal

    return "-" if mean is None or low is None or high is None else f"{mean:+.3f} ({decimal(low)} to {decimal(high)})"


def _print(rows: Sequence[RunSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightning_trainer.report.progress import duration, sparkline
    from lightning_trainer.report.terminal import decimal, printable

    table = Table(
        "run", "steps", "before", "after", "difference", "training reward", "", "time", "tokens", "checkpoint"
    )
    for row in rows:
        ends = row.curve[:1] + row.curve[1:][-1:]  # one number for a single step
        table.add_row(
            Text(printable(row.folder), overflow="fold"),  # its end is what tells runs apart
            f"{row.steps}",
            "-" if row.before is None else decimal(row.before),
            "-" if row.after is None else decimal(row.after),
            _interval(row.difference, row.difference_low, row.difference_high),
            " to ".join(decimal(reward) for reward in ends) or "-",
            sparkline(row.curve, 16) if row.curve else "",
            duration(row.seconds),
            f"{row.tokens:,}",
            "yes" if row.trainable else "no",
        )
    screen().print(table)
