"""`lightning-rl replay`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.cli.options import name_by_option, print_json, screen, store_option
from lightning_trainer.cli.records.fork import names, subject_of
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.replaying import Regression


@click.command(name="replay")
@click.argument("target", required=False)
@click.option("--rollouts", "file", type=click.Path(path_type=Path), metavar="FILE", help="An id or JSON a line.")
@click.option("--rollout", "rollouts", multiple=True, metavar="ID", help="Rollout, attempt or trace. Repeatable.")
@click.option("--model", help="Another model answers the agents: a run, checkpoint, model folder or name.")
@click.option("--endpoint", metavar="URL", help="Or an OpenAI-compatible server; --model then names what it is asked.")
@click.option("--agents", metavar="NAME,...", help="Whose calls it answers. [default: those a policy answered, or all]")
@name_by_option
@click.option("--run-tools", default="", metavar="NAME,...", help="Tools that are run; others get recorded results.")
@click.option("--stop", is_flag=True, help="End a replay at its first difference, in place of going on.")
@click.option("--success", type=float, help="Least reward that is a success. [default: the recorded one]")
@click.option("--fail-under", type=click.FloatRange(0, 1), help="End with status 1 where a smaller share succeeds.")
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result).")
@click.option("--temperature", type=click.FloatRange(0), help="Forced on the calls that are drawn.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer whose request names no limit.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the draws.")
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), help="Time limit of an attempt.")
@click.option("--workers", type=click.IntRange(1), help="Worker processes; one a core by default.")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    stop: bool,
    success: float | None,
    fail_under: float | None,
    store: str,
    **sampling: Any,
) -> None:
    """Run recorded attempts against the program TARGET as it is now, or against another model.

    Model calls get their recorded answers wherever the program asks for the same, and the rest goes to the program's
    own endpoints; with --model that model answers all calls of its agents. Tools get their recorded results and are not
    run. Says which records still succeed, and where each parts from what was recorded. Without ids, all rollouts of the
    store that succeeded are replayed.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.replaying import Program, ReplayConfig, replay_all
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
