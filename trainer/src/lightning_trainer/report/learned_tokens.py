"""What each update saw of its training tokens: one small file per step in the run's folder, for inspection.

Axes: `_K` trained tokens of a row.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.rl.rows import Row

FOLDER: Final = "tokens"  # in the run's folder
_DIGEST: Final = 16  # bytes of a row's name
_UNREADABLE: Final = (
    OSError, EOFError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_MOST_BYTES: Final = 1 << 30  # most bytes of a file when unpacked
_LATER: Final = 8  # updates after which a row collected during other updates may be learned


class SeenTokens(NamedTuple):
    """What an update saw of a row's trained tokens when it first read them, before it changed anything.

    Attributes:
        gap: (K,) log-probability under the trainer minus the one recorded when the token was sampled, in nats.
        entropy: (K,) entropy in nats of the distribution that each was sampled from, under the trainer.
    """

    gap: NDArray[np.floating]
    entropy: NDArray[np.floating]


def write(run: Path, step: int, seen: Mapping[bytes, SeenTokens]) -> None:
    """Store what the update of a step saw, in four bytes per token: half precision is enough for inspection.

    Args:
        run: the run's folder.
        step: steps taken before.
        seen: by the name of the row; rows that the update left out are missing.

    Raises:
        OSError: it cannot be written.
    """
    if not seen:
        return
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    partial = folder / f".{step}.npz"
    with partial.open("wb") as file:
        np.savez(
            file,
            names=np.stack([np.frombuffer(name, np.uint8) for name in seen]),
            lengths=np.array([len(each.gap) for each in seen.values()], np.int64),
            gap=np.concatenate([each.gap for each in seen.values()]).astype(np.float16),
            entropy=np.concatenate([each.entropy for each in seen.values()]).astype(np.float16),
        )
    partial.replace(folder / f"{step}.npz")  # readers see the whole file or none


def read(run: Path, step: int, row: Row) -> SeenTokens | None:
    """Return what the update saw of a row, which was rebuilt from the store; None if unknown.

    Args:
        run: the run's folder.
        step: steps taken before, when the row was requested; it may have been learned some steps later.
        row: of the same attempt, with the same tokens trained.
    """
    return next((found for n in range(step, step + _LATER) if (found := _read(run, n, row)) is not None), None)


def row_name(row: Row) -> bytes:
    """Return 16 bytes that identify a row: by its attempt, its tokens, and which of them are trained."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in (row.attempt_id.encode(), row.tokens.astype("<i4").tobytes(), row.mask.tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _read(run: Path, step: int, row: Row) -> SeenTokens | None:
    try:
        path = run / FOLDER / f"{step}.npz"
        with zipfile.ZipFile(path) as parts:
            if sum(part.file_size for part in parts.infolist()) > _MOST_BYTES:
                return None
        with np.load(path, allow_pickle=False) as file:
            found = np.flatnonzero((file["names"] == np.frombuffer(row_name(row), np.uint8)).all(axis=1))
            if not len(found):
                return None
            end = int(file["lengths"][: found[0] + 1].sum())
            own = slice(end - int(file["lengths"][found[0]]), end)
            return SeenTokens(file["gap"][own], file["entropy"][own])
    except _UNREADABLE:  # it is missing, truncated, or not written by a run
        return None
