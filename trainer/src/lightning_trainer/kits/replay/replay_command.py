"""`lightning-rl replay`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.flags.common import isolate_option, json_option, name_by_option, print_json, screen, store_option
from lightning_trainer.kits.replay.fork_command import names, subject_of
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
@click.option(
    "--rollout", "rollouts", multiple=True, metavar="ID", help="Rollout, attempt or trace to replay. May be repeated."
)
@click.option(
    "--model", help="Model that answers the agents instead: a run, a checkpoint, a model folder or a model name."
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="OpenAI-compatible server that answers them; --model is then the model name in the requests.",
)
@click.option(
    "--agents",
    metavar="NAME,...",
    help="Agents that the model answers. [default: those that a policy answered, otherwise all]",
)
@name_by_option
@click.option(
    "--run-tools", default="", metavar="NAME,...", help="Tools that are called; the others return recorded results."
)
@click.option("--stop", is_flag=True, help="End a replay at its first difference.")
@click.option("--success", type=float, help="Minimum reward of a success. [default: the recorded reward]")
@click.option("--fail-under", type=click.FloatRange(0, 1), help="Exit with status 1 if a smaller share succeeds.")
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result).")
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature, set on all sampled calls.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer if the request sets no limit.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Sampling seed.")
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), help="Time limit of an attempt, in seconds.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes. Default: one per core.")
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
    from lightning_trainer.report.progress import Shown

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
            agents=names(agents) or None if agents is not None else None,
            name_by=name_by,
            subject=subject_of(model, endpoint, key),
            isolate=bool(isolate),
            **sampling,
        ),
        run_tools=names(run_tools),
        stop=stop,
        success=success,
    )
    with Shown("replaying") as progress:
        found = replay_all(config, progress)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if fail_under is not None and found.succeeded < fail_under * len(found.replayed):
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
