"""`lightning-rl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lightning_trainer.flags.answers import agents_flag
from lightning_trainer.flags.common import config_options, print_json, reading
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import key_file_option, origin_option, store_option
from lightning_trainer.kits.export.wanted import FORMATS
from lightning_trainer.options.permits import PermitOptions, take_permits
from lightning_trainer.options.record import split_names
from lightning_trainer.options.selection import SelectionOptions


def _names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else split_names(value)


@click.command(name="export")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", type=click.Choice(FORMATS), required=True, help="Content of a line, see above.")
@agents_flag("Only calls of these agents; names or globs.", callback=_names)
@field_option(
    SelectionOptions,
    "min_reward",
    metavar="X",
    text="Only rollouts in which the agent earned at least this reward.",
)
@field_option(
    SelectionOptions,
    "best",
    metavar="N",
    type=int,
    text="Only the N attempts with the highest reward of each group and agent.",
)
@click.option("--sources", callback=_names, metavar="NAME,...", help="Count only rewards from these sources.")
@origin_option
@click.option(
    "--validation", is_flag=True, help="Include validation rollouts. Their tasks are then no longer held out."
)
@click.option(
    "--split", "held_out", type=float, default=0.0, metavar="X",
    help="Hold out this share of the tasks, and all validated tasks, in a file named after OUT"
" with .held-out.jsonl.",
)  # fmt: skip
@click.option("--split-by", "task_fields", callback=_names, metavar="FIELD,...", help="Fields that identify a task.")
@click.option(
    "--all-pairs",
    is_flag=True,
    help="dpo: pair each better answer with each worse one, instead of only the best with the worst.",
)
@click.option("--margin", type=float, default=0.0, metavar="X", help="dpo: minimum difference in reward within a pair.")
@click.option("--ids/--no-ids", default=True, help="sft, dpo: include the recorded tokens, or only messages.")
@config_options(PermitOptions)
@store_option
@key_file_option
def command(*, out: Path, store: str, key_file: Path | None, **options: Any) -> None:
    """Write the traces of a store to OUT, a .jsonl file, for other trainers and viewers.

    If OUT exists, it is replaced once the new file is complete.

    sft: conversations (messages, tools), with input_ids and labels if tokens were recorded. dpo: pairs of answers to
    one prompt within a group (prompt, chosen, rejected). tokens: only input_ids and labels, one line per training row.
    openinference: spans. Each line names its source: rollout, attempt, spans, reward, weights.

    The last line on stdout is JSON: lines, and left_out with the number of model calls by reason.
    """
    from lightning_trainer.kits.export.export import export
    from lightning_trainer.kits.export.wanted import ExportSelection

    permits = take_permits(options)
    wanted = ExportSelection(**options, permits=permits)
    with reading(store, key_file) as source:
        done = export(source, wanted, out)
    lines = done.lines + done.held_out
    if wanted.format in ("sft", "dpo") and 0 < done.with_tokens < lines:
        click.echo(
            f"{done.with_tokens} of {lines} lines hold tokens. Trainers that take a file's columns as a whole, such as "
            "TRL, need all or none: name --agents whose tokens were recorded, or give --no-ids.", err=True,
        )  # fmt: skip
    if wanted.held_out and not done.held_out:
        click.echo(
            f"no task is among the {wanted.held_out:g} that are held out, because there are few tasks. Give a"
            " larger --split, or divide the tasks by hand.", err=True,
        )  # fmt: skip
    print_json(
        {
            "lines": done.lines,
            "left_out": done.left_out,
            "held_out": done.held_out,
            "with_tokens": done.with_tokens,
            "files": [str(path) for path in done.files],
        }
    )
