"""What each update saw of the tokens that it learned from: a small file for each step in the run's folder, to look at.

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
_DIGEST: Final = 16  # bytes that name a row
_UNREADABLE: Final = (
    OSError, EOFError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_MOST_BYTES: Final = 1 << 30  # of a file, unpacked
_LATER: Final = 8  # updates after which a row may be learned that was collected while others were


class SeenTokens(NamedTuple):
    """What an update saw of a row's trained tokens when it first read them, before it changed anything.

    Attributes:
        gap: (K,) log-probability under the trainer less that recorded when the token was drawn, in nats.
        entropy: (K,) entropy in nats of the distribution that each was drawn from, under the trainer.
    """

    gap: NDArray[np.floating]
    entropy: NDArray[np.floating]


def write(run: Path, step: int, seen: Mapping[bytes, SeenTokens]) -> None:
    """Keep what the update of a step saw: four bytes a token, for half precision is enough to look at.

    Args:
        run: the run's folder.
        step: steps taken before.
        seen: by the name of the row; rows that the update left out are not in it.

    Raises:
        OSError: it can't be written.
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
    partial.replace(folder / f"{step}.npz")  # who looks at it sees it whole or not at all


def read(run: Path, step: int, row: Row) -> SeenTokens | None:
    """Return what its update saw of a row, made again from the store; None where it is not known.

    Args:
        run: the run's folder.
        step: steps taken before, when the row was asked for; it may have been learned some steps later.
        row: of the same attempt, with the same tokens trained.
    """
    return next((found for n in range(step, step + _LATER) if (found := _read(run, n, row)) is not None), None)


def row_name(row: Row) -> bytes:
    """Return 16 bytes that tell a row from others: by its attempt, its tokens, and which of them are trained."""
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
    except _UNREADABLE:  # none was written, it was cut, or it is a stranger's
        return None
