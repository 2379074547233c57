"""`lightning-rl replay`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.flags.answers import answered_agents_option, endpoint_option, model_option, name_by_option
from lightning_trainer.flags.common import print_json, screen
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_option, rollouts_option, store_option
from lightning_trainer.flags.program import isolate_option, program_options
from lightning_trainer.kits.replay.fields import ReplayFields
from lightning_trainer.kits.replay.flags import sampling_options, subject_of
from lightning_trainer.options.record import split_names
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.kits.replay import Regression


@click.command(name="replay")
@click.argument("target", required=False)
@click.option(
    "--rollouts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with one id or JSON object per line.",
)
@rollouts_option("Rollout, attempt or trace to replay")
@model_option("Model that answers the agents instead")
@endpoint_option("that answers them")
@answered_agents_option("[default: those that a policy answered, otherwise all]")
@name_by_option
@field_option(
    ReplayFields,
    "run_tools",
    default="",
    metavar="NAME,...",
    text="Tools that are called; the others return recorded results.",
)
@field_option(ReplayFields, "stop", default=False)
@field_option(ReplayFields, "success")
@click.option("--fail-under", type=click.FloatRange(0, 1), help="Exit with status 1 if a smaller share succeeds.")
@program_options()
@sampling_options
@isolate_option
@store_option
@json_option
def command(
    *,
    as_json: bool,
    target: str | None,
    program: str | None,
    reward: str | None,
    model: str | None,
    endpoint: str | None,
    agents: str | None,
    name_by: tuple[str, ...],
    run_tools: str,
    rollouts: tuple[str, ...],
    file: Path | None,
    isolate: bool | None,
    stop: bool,
    success: float | None,
    fail_under: float | None,
    store: str,
    **sampling: Any,
) -> None:
    """Replay recorded rollouts against the current program TARGET, or against another model.

    A model call gets its recorded answer if its request equals a recorded one; other calls go to the program's own
    endpoints. With --model, that model answers all calls of its agents. Tools return their recorded results and are not
    called. The report lists which rollouts still succeed, and where each one first differs from the record. Without
    ids, all successful rollouts of the store are replayed.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.kits.replay import Program, ReplayConfig, replay_all
    from lightning_trainer.report.progress import ProgressDisplay

    key = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    remember(key)
    config = ReplayConfig(
        store=store,
        rollouts=rollouts,
        file=file,
        program=Program(
            target=target,
            command=program,
            reward=reward,
            agents=split_names(agents) or None if agents is not None else None,
            name_by=name_by,
            subject=subject_of(model, endpoint, key),
            isolate=bool(isolate),
            **sampling,
        ),
        run_tools=split_names(run_tools),
        stop=stop,
        success=success,
    )
    with ProgressDisplay("replaying") as progress:
        found = replay_all(config, progress)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if fail_under is not None and found.succeeded / len(found.replayed) < fail_under:
        click.get_current_context().exit(1)


def _show(found: Regression) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("record", "then", "now", "succeeds", "parts at, or fails with")
    for each in found.replayed:
        then, now = ("-" if value is None else decimal(value) for value in (each.recorded, each.reward))
        verdict = Text("yes", style="green") if each.succeeds else Text("no", style="red")
        told = "; then: ".join(part for part in (each.parted, each.reason) if part is not None)
        table.add_row(Text(printable(each.name)), then, now, verdict, Text(printable(told)))
    screen().print(table)
    counts = found.to_json()
    click.echo(
        f"{counts['succeed']} of {counts['records']} succeed; {counts['as_recorded']} go as recorded to their end"
    )
