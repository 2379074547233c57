"""`lightning-rl tasks`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.config.files import merge
from lightning_trainer.flags.common import GroupedCommand, config_options, given_flags, print_json, screen
from lightning_trainer.flags.files import config_file_option, json_flag

if TYPE_CHECKING:
    from lightning_trainer.kits.export.files import Draft
    from lightning_trainer.report.forecast import TaskTrial
    from lightning_trainer.run.data import Task


TRIAL_S = 30.0  # default time limit for rollouts
LEFT_OUT = frozenset(
    {
        "target",
        "group_size",
        "steps",
        "epochs",
        "until",
        "batch_size",
        "out",
        "resume",
        "val",
        "env_held_out",
        "val_every",
        "val_samples",
        "save_every",
        "keep",
        "checkpoint",
        "trackers",
        "store",
        "port",
    }
)  # fmt: skip - a trial takes no step and keeps nothing


@click.command(name="tasks", cls=GroupedCommand)
@click.argument("target", required=False)
@config_file_option("these options as keys")
@click.option("--samples", default=4, show_default=True, type=click.IntRange(2), help="Rollouts per task.")
@click.option(
    "--first",
    type=click.IntRange(1),
    help="Try the first N tasks. Default: as many as fit into 30 seconds; with --keep, all.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Write the tasks that have a signal to this .jsonl file.")
@json_flag("Print one JSON object per task.")
@config_options(leave_out=LEFT_OUT)
def command(
    *,
    target: str | None,
    file: Path | None,
    samples: int,
    first: int | None,
    keep: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure how hard each task is for the model, and which tasks have a signal, from a few rollouts of each.

    If all rollouts of a task have the same reward, there is nothing to learn from it: the task is too hard, or already
    solved. --keep writes the other tasks to a file for `train --data`. With few rollouts a hard task may be dropped by
    chance: use more --samples for hard tasks.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer import registry
    from lightning_trainer.config.origin import with_format
    from lightning_trainer.report.forecast import verdict
    from lightning_trainer.report.progress import ProgressDisplay
    from lightning_trainer.report.terminal import decimal, printable
    from lightning_trainer.run.data import load_tasks
    from lightning_trainer.run.embedded import EmbeddedBackend

    options = {**given_flags(flags), **({"target": target} if target else {}), "group_size": samples}
    config = with_format(merge(file, options))
    backend = registry.by_name("backend", config.backend)
    if not isinstance(backend, EmbeddedBackend):
        raise ConfigError(f"tasks needs a model in this process, which backend = {config.backend} does not have.")
    tasks = load_tasks(config.data, config.columns)[:first]
    with ExitStack() as stack:  # a trial may take hours: first check that its tasks can be stored
        kept = stack.enter_context(closing(_draft(keep, config.data))) if keep is not None else None
        limit_s = TRIAL_S if first is None and keep is None else math.inf
        with ProgressDisplay(f"trying up to {len(tasks)} tasks, {samples} times each") as progress:
            probe = backend.probe(config, tasks, range(len(tasks)), progress, update=False, limit_s=limit_s)
            tried = probe.tried
        if len(tried) < len(tasks):
            click.echo(f"{len(tried)} of {len(tasks)} tasks tried in {limit_s:.0f} s. More: --first N", err=True)
        if as_json:
            for one in tried:
                print_json(_facts(one, tasks[one.place]))
        else:
            _print(tried, tasks)
        click.echo(verdict(tried), err=as_json)
        for agent, reward in probe.constant.items():
            click.echo(
                printable(
                    f"{agent} earned {decimal(reward)} in all {probe.rollouts} rollouts: no signal for it so far"
                ),
                err=as_json,
            )
        if kept is not None:
            _keep(kept, tried, tasks)


def _facts(one: TaskTrial, task: Task) -> dict[str, Any]:
    mean = one.mean
    return {
        "task": task,
        "place": one.place,
        "mean": mean,
        "best": max(one.rewards, default=None),
        "rewards": list(one.rewards),
        "failed": one.failed,
        "teaches": one.contrast,
    }


def _print(tried: Sequence[TaskTrial], tasks: Sequence[Task]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightning_trainer.report.terminal import decimal, printable

    table = Table("number", "mean", "best", "worst", "failed", "signal", "task")
    for one in sorted(tried, key=lambda one: (one.mean is None, one.mean or 0.0)):
        known = one.mean is not None
        table.add_row(
            f"{one.place + 1}",
            "-" if one.mean is None else decimal(one.mean),
            decimal(max(one.rewards)) if known else "-",
            decimal(min(one.rewards)) if known else "-",
            f"{one.failed}",
            Text("yes", style="green") if one.contrast else Text("no", style="red"),
            Text(printable(json.dumps(tasks[one.place], ensure_ascii=False)[:60])),
        )
    screen().print(table)


def _draft(path: Path, data: Path) -> Draft:
    """Start the file for the tasks that are kept.

    Raises:
        ConfigError: it cannot be written, `train --data` could not read it, or it would overwrite a file of
            tasks.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.kits.export.files import Draft
    from lightning_trainer.run.data import task_files

    if path.suffix != ".jsonl":
        raise ConfigError(f"{path}: the file holds JSON Lines. Give it a name that ends with .jsonl.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give the name of a file.")
    if path.exists() and any(path.samefile(file) for file in task_files(data)):
        raise ConfigError(f"--keep {path} is a file of --data, and would lose its other tasks. Name another file.")
    return Draft(path)


def _keep(draft: Draft, tried: Sequence[TaskTrial], tasks: Sequence[Task]) -> None:
    from lightning_spans.errors import NothingToLearnError

    kept = [tasks[one.place] for one in sorted(tried, key=lambda one: one.place) if one.contrast]
    if not kept:
        raise NothingToLearnError(f"no task has a signal, so {draft.path} is not written.")
    draft.write(kept)
    draft.end()
    draft.name()
    click.echo(f"{len(kept)} of {len(tried)} tasks in {draft.path}", err=True)
