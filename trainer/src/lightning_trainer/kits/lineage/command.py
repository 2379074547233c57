"""`lightning-rl lineage`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.flags.common import print_json, screen
from lightning_trainer.flags.files import json_option, key_file_option, runs_option, store_option
from lightning_trainer.reasons.amounts import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_trainer.lineage.reading import CheckpointLineage
    from lightning_trainer.lineage.search import AffectedCheckpoint


@click.command(name="lineage")
@click.argument("what", metavar="CHECKPOINT|ID")
@runs_option
@click.option(
    "--signing-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key with which every line must be signed. Default: LIGHTNING_LINEAGE_KEY_FILE, otherwise not checked.",
)
@click.option("--block", metavar="REASON", help="Block the checkpoints: serve, server and deploy then refuse them.")
@click.option("--unblock", is_flag=True, help="Allow the checkpoints again.")
@store_option
@key_file_option
@json_option
def command(
    *,
    what: str,
    runs: Sequence[Path],
    signing_key: Path | None,
    block: str | None,
    unblock: bool,
    store: str,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Show what a checkpoint learned from, or which checkpoints learned from a call.

    CHECKPOINT is a run's folder, a checkpoint or a file of `prompts`. ID is that of a call, reward, rollout, attempt,
    trace or tenant. The lineage is verified: a line that was changed is an error. If no checkpoint learned from an ID,
    it is looked up in --store and in the stores of the runs, so that a mistyped one is an error.

    JSON has the keys calls, rewards, sources, checkpoints and tainted. For a checkpoint, checkpoints are itself and
    those that it started from, and tainted those among them that are blocked. For an ID, checkpoints learned from it,
    and tainted started from one of these.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.lineage.blocks import search_folder
    from lightning_trainer.lineage.chain import read_signing_key
    from lightning_trainer.lineage.reading import read_lineage, resolve_checkpoint
    from lightning_trainer.lineage.search import find_checkpoints

    if block is not None and unblock:
        raise ConfigError("lineage: --block and --unblock contradict each other. Give one of them.")
    key = read_signing_key(signing_key)
    place = search_folder(Path(what)) if Path(what).is_file() else Path(what)
    if place.is_dir():
        _change([resolve_checkpoint(place)], [], block, unblock=unblock)
        lineage = read_lineage(place, key)
        if as_json:
            print_json(_checkpoint_json(lineage, runs))
        else:
            _show_checkpoint(lineage, runs)
        return
    found = find_checkpoints(runs, {what}, key)
    if not found:
        _refuse_unknown(what, runs, store, key_file)
    _change([one.folder for one in found], [what], block, unblock=unblock)
    if as_json:
        print_json(_id_json(what, found))
    else:
        _show_affected(what, runs, found)


def _change(folders: Sequence[Path], ids: Sequence[str], block: str | None, *, unblock: bool) -> None:
    from lightning_trainer.lineage.blocks import block_checkpoint, unblock_checkpoint

    for folder in folders:
        if block is not None:
            block_checkpoint(folder, block, ids)
        elif unblock:
            unblock_checkpoint(folder)


def _refuse_unknown(what: str, runs: Sequence[Path], store: str, key_file: Path | None) -> None:
    """Reject an ID that no store has.

    Raises:
        ConfigError: names the stores that were searched.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.flags.common import reading
    from lightning_trainer.lineage.records import has_record

    stores = _stores_to_search(store, runs)
    for url in stores:
        with reading(url, key_file if url == store else None) as opened:
            if has_record(opened, what):
                return
    searched = f"and not in {', '.join(stores)}" if stores else f"and there is no store {store}"
    raise ConfigError(
        f"{what!r} is unknown: it is not a folder, not in a checkpoint's lineage in {', '.join(map(str, runs))},"
        f" {searched}. Check the id, or give --runs or --store. Deleted records are no longer in a store."
    )


def _stores_to_search(store: str, runs: Sequence[Path]) -> list[str]:
    """Return the named store, unless it is a missing file, and the stores in the folders of runs."""
    from lightning_trainer.session.session import STORE_NAME

    path = Path(store.removeprefix("sqlite:///"))
    named = [store] if "://" in store.removeprefix("sqlite:///") or path.is_file() else []
    found = {str(one) for folder in runs if folder.is_dir() for one in folder.rglob(STORE_NAME)}
    return [*named, *sorted(found - {store})]


def _checkpoint_json(lineage: CheckpointLineage, runs: Sequence[Path]) -> dict[str, Any]:
    from lightning_trainer.lineage.blocks import block_of
    from lightning_trainer.lineage.reading import IDS
    from lightning_trainer.lineage.search import find_ancestors

    folders = [lineage.checkpoint, *find_ancestors(runs, lineage)]
    begun = lineage.begun
    return {
        **{name: lineage.all_of(name) for name in (*IDS, "sources", "lines")},
        "prompts": lineage.prompts,
        **{name: begun.get(name) for name in ("model", "data", "code", "options")},
        "steps": len(lineage.steps),
        "checkpoints": [str(folder) for folder in folders],
        "tainted": [str(folder) for folder in folders if block_of(folder) is not None],
        "signed": lineage.signed,
    }


def _id_json(what: str, found: Sequence[AffectedCheckpoint]) -> dict[str, Any]:
    direct = [one for one in found if one.ids]
    return {
        "calls": [what] if any("calls" in one.kinds for one in direct) else [],
        "rewards": [what] if any("rewards" in one.kinds for one in direct) else [],
        "sources": [],
        "checkpoints": [str(one.folder) for one in direct],
        "tainted": [str(one.folder) for one in found if not one.ids],
    }


def _show_checkpoint(lineage: CheckpointLineage, runs: Sequence[Path]) -> None:
    facts = _checkpoint_json(lineage, runs)
    signature = {True: "signature checked", False: "not signed", None: "signed, not checked: give --signing-key"}
    given = ", ".join(facts["sources"]) or "no source"
    calls = amount(len(facts["calls"]), "call")
    lines = [
        f"{lineage.checkpoint}: {amount(facts['steps'], 'step')}, chain intact, {signature[lineage.signed]}",
        *(f"BLOCKED: {lineage.blocked}" for _ in range(lineage.blocked is not None)),
        f"started from {facts['model']}",
        *(f"from checkpoint {folder}" for folder in facts["checkpoints"][1:]),
        f"{calls} of {amount(len(facts['rollouts']), 'rollout')}, {amount(len(facts['rewards']), 'reward')} ({given})",
        *(f"tenant {tenant}" for tenant in facts["tenants"]),
        *(f"data {file['path']}  sha256 {file['sha256'][:16]}" for file in facts["data"] or ()),
        *(f"code {file['path']}  sha256 {file['sha256'][:16]}" for file in facts["code"] or ()),
        *(f"{amount(len(digests), 'system prompt')} of {agent}" for agent, digests in facts["prompts"].items()),
    ]
    _print(lines)


def _show_affected(what: str, runs: Sequence[Path], found: Sequence[AffectedCheckpoint]) -> None:
    from lightning_trainer.lineage.search import describe

    _print(describe(found) or [f"No checkpoint in {', '.join(map(str, runs))} learned from {what}."])


def _print(lines: Sequence[str]) -> None:
    from rich.text import Text

    from lightning_trainer.report.terminal import printable

    for line in lines:
        screen().print(Text(printable(line)), soft_wrap=True)
