"""Checkpoints that must not be served, for example because they learned from data that was deleted later."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError

BLOCKED: Final = "blocked.json"  # in a checkpoint's folder; copied with it
ALLOW: Final = "--allow-blocked"


def search_folder(prompts: Path) -> Path:
    """Return the folder of the search that wrote a file of prompts, which has its lineage and its block."""
    return prompts.with_name(f"{prompts.name}.search")


def block_checkpoint(checkpoint: Path, reason: str, ids: Sequence[str] = ()) -> None:
    """Block a checkpoint from being served. If it is already blocked, its reason is kept.

    Raises:
        ConfigError: the block cannot be written.
    """
    path = checkpoint / BLOCKED
    if path.exists():
        return
    values = {"reason": reason, "deleted": sorted(ids), "at": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{checkpoint} can't be blocked: {error.strerror}.") from None


def unblock_checkpoint(checkpoint: Path) -> bool:
    """Unblock a checkpoint, and return whether it was blocked."""
    blocked = _folder_of_block(checkpoint)
    if blocked is not None:
        (blocked / BLOCKED).unlink()
    return blocked is not None


def block_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint, or the checkpoint that contains this adapter, is blocked; None: it is not."""
    blocked = _folder_of_block(checkpoint)
    if blocked is None:
        return None
    try:
        values = json.loads((blocked / BLOCKED).read_text(encoding="utf-8"))
        return f"{values['reason']} ({values['at']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{blocked / BLOCKED} can't be read"


def refuse_blocked(checkpoint: Path, *, allowed: bool) -> None:
    """Reject a blocked checkpoint.

    Raises:
        ConfigError: it is blocked, and `allowed` is False.
    """
    reason = None if allowed else block_of(checkpoint)
    if reason is not None:
        raise ConfigError(f"{checkpoint} is blocked: {reason}. Serve another checkpoint, or add {ALLOW}.")


def _folder_of_block(checkpoint: Path) -> Path | None:
    folder = checkpoint.resolve()
    places = (search_folder(folder), folder, folder.parent)
    return next((each for each in places if (each / BLOCKED).is_file()), None)
