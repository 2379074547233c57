"""`lightning-rl prune`."""

from __future__ import annotations

import difflib
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import reading
from lightning_trainer.flags.files import (
    key_file_option,
    origin_option,
    rollouts_option,
    runs_option,
    store_option,
    tenant_option,
    traces_option,
)
from lightning_trainer.report.terminal import printable, some

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.store import Store
    from lightning_spans.store.protocol import DeleteFilter
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
@traces_option("Only this trace, which has no rollout")
@click.option(
    "--call",
    "calls",
    multiple=True,
    metavar="ID",
    help="Only this model call, which has neither a rollout nor a trace. May be repeated.",
)
@tenant_option("Delete the live traces that name this tenant.")
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
    calls: Sequence[str],
    tenant: str | None,
    expired: bool,
    runs: Sequence[Path],
    block_checkpoints: bool,
    compact: bool,
    yes: bool,
    store: str,
    key_file: Path | None,
) -> None:
    """Delete old traces: rollouts that ended, with all their records, and traces without a rollout.

    Waiting and running rollouts are kept, and so is the record of which groups were trained on. The store may be in
    use: rows are deleted in small steps. A candidate's answers to copies of live calls are deleted with these calls.

    The checkpoints that learned from what is deleted are listed, and blocked with --block-checkpoints.
    """
    from lightning_spans.store.protocol import DeleteFilter
    from lightning_trainer.lineage.deletion import find_deleted
    from lightning_trainer.lineage.search import describe, find_checkpoints

    before_ns = None if age_s is None else time.time_ns() - int(age_s * 1e9)
    named = DeleteFilter(
        rollout_ids=rollouts or None,
        trace_ids=traces or None,
        call_ids=calls or None,
        origin=origin,
        before_ns=before_ns,
    )
    _refuse_contradictions(named, found=expired or tenant is not None)
    with reading(store, key_file) as opened:
        _refuse_owned(opened, calls)
        wanted, tenants = named, set[str]()
        if expired or tenant is not None:
            wanted, tenants = _find_traces(opened, origin, tenant, expired=expired)
        ids = find_deleted(opened, runs, wanted) | ({tenant} if tenant is not None and not expired else set())
        affected = find_checkpoints(runs, ids) if ids else []  # before the deletion, which a broken manifest stops
        if tenant is not None and tenant not in tenants and not affected:
            raise _unknown_tenant(tenant, tenants, store)
        if not yes:
            _ask(_describe_choice(wanted, store, len(affected)))
        if block_checkpoints:
            _block(affected)
        deleted = opened.delete(**asdict(wanted), compact=compact)
    if not deleted and (rollouts or traces or calls):
        raise ConfigError(
            f"prune: nothing was deleted. The named rollouts, traces or calls are not in {store}, are waiting or"
            " running, or do not match the other filters."
        )
    click.echo(f"deleted: {deleted} (rollouts, and spans and calls without one)")
    for line in describe(affected):
        click.echo(printable(line))


def _refuse_contradictions(named: DeleteFilter, *, found: bool) -> None:
    """Reject options that contradict each other or name nothing.

    Args:
        named: what the options name.
        found: whether the traces are found by their tenant or retention.

    Raises:
        ConfigError: names the options, and what to do.
    """
    ids = (named.rollout_ids, named.trace_ids, named.call_ids)
    if found and (named.before_ns is not None or any(ids)):
        raise ConfigError(
            "prune: --expired and --tenant find the traces themselves. Leave out --older-than, --rollout, --trace and"
            " --call."
        )
    if named == type(named)() and not found:
        raise ConfigError(
            "prune: say what to delete: --older-than, --origin, --rollout, --trace, --call, --tenant or --expired."
        )
    if named.rollout_ids and (named.trace_ids or named.call_ids):
        raise ConfigError(
            "prune: --trace and --call are for records without a rollout. Give either --rollout or these."
        )


def _refuse_owned(store: Store, calls: Sequence[str]) -> None:
    """Reject calls of a rollout or a trace, whose other records would keep their text.

    Raises:
        ConfigError: names the call, and what to delete instead.
    """
    from lightning_spans.schema.calls import Call
    from lightning_spans.store.protocol import Where, each

    for call in each(store, Call, Where(call_ids=calls)) if calls else ():
        owner = f"--rollout {call.rollout_id}" if call.rollout_id is not None else f"--trace {call.trace_id}"
        if call.rollout_id is not None or call.trace_id is not None:
            raise ConfigError(f"prune: other records have the text of call {call.call_id}, too. Give {owner}.")


def _unknown_tenant(tenant: str, tenants: Collection[str], store: str) -> ConfigError:
    """Return the error for a tenant that no trace names, so that a mistyped one does not look deleted."""
    near = difflib.get_close_matches(tenant, tenants, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"prune: nothing was deleted. No live trace in {store} names the tenant {tenant!r}, and no checkpoint learned"
        f" from its traces.{hint} Tenants here: {some(sorted(tenants)) or 'none'}."
    )


def _find_traces(
    store: Store, origin: str | None, tenant: str | None, *, expired: bool
) -> tuple[DeleteFilter, set[str]]:
    """Find the traces of a tenant, or past their retention. Also return the tenants of all live traces."""
    from lightning_trainer.lineage.deletion import name_traces
    from lightning_trainer.lineage.permits import is_expired, tenants_of

    seen: set[str] = set()

    def is_wanted(trace: Trace) -> bool:
        tenants = tenants_of(trace)
        seen.update(tenants)
        return (tenant is None or tenant in tenants) and (not expired or is_expired(trace))

    return name_traces(store, origin, is_wanted), seen


def _describe_choice(wanted: DeleteFilter, store: str, affected: int) -> str:
    """Return the question to confirm before the deletion."""
    what = "of every origin" if wanted.origin is None else f"of origin {wanted.origin}"
    ids = [one for named in (wanted.rollout_ids, wanted.trace_ids, wanted.call_ids) for one in named or ()]
    count = f", {len(ids)} named" if ids else ""
    learned = f" {affected} checkpoints learned from them." if affected else ""
    return f"Delete traces {what}{count}{'' if wanted.before_ns is None else ', by age'} in {store}?{learned}"


def _block(affected: Sequence[AffectedCheckpoint]) -> None:
    """Block checkpoints. It comes before the deletion: if the command is killed, none of them stays unblocked."""
    from lightning_trainer.lineage.blocks import block_checkpoint

    for one in affected:
        block_checkpoint(one.folder, "it learned from traces that were deleted", one.ids)


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
