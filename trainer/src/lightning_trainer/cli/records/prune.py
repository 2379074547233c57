"""`lightning-rl prune`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import reading
from lightning_trainer.flags.files import key_file_option, origin_option, rollouts_option, runs_option, store_option
from lightning_trainer.report.terminal import printable

if TYPE_CHECKING:
    from lightning_spans.store import Store
    from lightning_trainer.lineage.search import AffectedCheckpoint

_EXAMPLE: Final = (
    "From cron, so that live traces are kept for 30 days: "
    "lightning-rl prune --origin live --older-than 30d --yes --store http://server:8000 --key-file admin.key"
)
_UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def _age_s(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Parse a time span such as ``12h`` or ``30d``, in seconds."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", value)
    if found is None:
        raise click.BadParameter(f"{value!r}: give a number with m, h, d or w, such as 30d", context, option)
    return float(found[1]) * _UNITS_S[found[2]]


@click.command(name="prune", epilog=_EXAMPLE)
@click.option(
    "--older-than", "age_s", callback=_age_s, metavar="AGE", help="Delete what ended this long ago, such as 12h or 30d."
)
@origin_option
@rollouts_option("Only this rollout")
@click.option(
    "--trace", "traces", multiple=True, metavar="ID", help="Only this trace, which has no rollout. May be repeated."
)
@click.option("--expired", is_flag=True, help="Delete live traces that are past the retention that they state.")
@runs_option
@click.option(
    "--block-checkpoints",
    is_flag=True,
    help="Block the checkpoints that learned from it: serve, server and deploy then refuse them.",
)
@click.option(
    "--compact",
    is_flag=True,
    help="Rewrite the tables afterwards, so that their files contain nothing deleted. Other processes wait meanwhile.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@store_option
@key_file_option
def command(
    *,
    age_s: float | None,
    origin: str | None,
    rollouts: Sequence[str],
    traces: Sequence[str],
    expired: bool,
    runs: Path,
    block_checkpoints: bool,
    compact: bool,
    yes: bool,
    store: str,
    key_file: Path | None,
) -> None:
    """Delete old traces: rollouts that ended, with all their records, and traces without a rollout.

    Waiting and running rollouts are kept, and so is the record of which groups were trained on. The store may be in
    use: rows are deleted in small steps.

    If traces or rollouts are named, the checkpoints that learned from them are listed, and blocked with
    --block-checkpoints.
    """
    from lightning_trainer.lineage.blocks import block_checkpoint
    from lightning_trainer.lineage.search import describe

    _refuse_contradictions(age_s, origin, rollouts, traces, expired=expired, block_checkpoints=block_checkpoints)
    with reading(store, key_file) as opened:
        if expired:
            traces = _find_expired(opened, origin)
            if not traces:
                click.echo("deleted: 0 (no trace is past its retention)")
                return
        affected = _find_affected(runs, [*rollouts, *traces])
        if not yes:
            _ask(_describe_choice(origin, len(rollouts or traces), age_s, store))
        deleted = opened.delete(
            rollout_ids=rollouts or None,
            trace_ids=traces or None,
            origin=origin,
            before_ns=None if age_s is None else time.time_ns() - int(age_s * 1e9),
            compact=compact,
        )
    if not deleted and (rollouts or traces):
        raise ConfigError(
            f"prune: nothing was deleted. The named traces or rollouts are not in {store}, are waiting or running, or"
            " do not match the other filters."
        )
    click.echo(f"deleted: {deleted} (rollouts, and spans and calls without one)")
    if block_checkpoints:
        for one in affected:
            block_checkpoint(one.folder, "it learned from traces that were deleted", one.ids)
    for line in describe(affected):
        click.echo(printable(line))


def _refuse_contradictions(
    age_s: float | None,
    origin: str | None,
    rollouts: Sequence[str],
    traces: Sequence[str],
    *,
    expired: bool,
    block_checkpoints: bool,
) -> None:
    """Reject options that contradict each other or name nothing.

    Raises:
        ConfigError: names the options, and what to do.
    """
    named = bool(rollouts or traces)
    if expired and (age_s is not None or named):
        raise ConfigError("prune: --expired finds the traces itself. Leave out --older-than, --rollout and --trace.")
    if age_s is None and origin is None and not (named or expired):
        raise ConfigError("prune: say what to delete: --older-than, --origin, --rollout, --trace or --expired.")
    if block_checkpoints and not (named or expired):
        raise ConfigError("prune: --block-checkpoints needs traces: give --trace, --rollout or --expired.")
    if rollouts and traces:
        raise ConfigError("prune: --trace is for traces without a rollout. Give either --rollout or --trace.")


def _describe_choice(origin: str | None, named: int, age_s: float | None, store: str) -> str:
    """Return the question to confirm before the deletion."""
    what = "of every origin" if origin is None else f"of origin {origin}"
    count = f", {named} named" if named else ""
    return f"Delete traces {what}{count}{'' if age_s is None else ', by age'} in {store}?"


def _find_expired(store: Store, origin: str | None) -> list[str]:
    """Return the ids of the traces past their retention."""
    from lightning_spans.store.traces import each_trace
    from lightning_trainer.lineage.permits import is_expired

    found = (trace for trace in each_trace(store, origin=origin) if trace.attempt_id is None and is_expired(trace))
    return sorted({node.span.trace_id for trace in found for node in trace})


def _find_affected(runs: Path, ids: Sequence[str]) -> list[AffectedCheckpoint]:
    """Return the checkpoints that learned from these ids.

    It runs before the deletion, which a broken manifest stops.
    """
    from lightning_trainer.lineage.search import find_checkpoints

    return find_checkpoints(runs, ids) if ids else []


def _ask(question: str) -> None:
    """Ask for confirmation, and stop if the answer is no.

    Raises:
        ConfigError: nothing was confirmed, and there is no terminal to ask.
    """
    try:
        click.confirm(question, abort=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise ConfigError("prune: nothing was deleted without a confirmation. Without a terminal, add --yes.") from None
