"""A folder for what agents print where a command keeps no folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_spans.errors import LightningError


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder that goes with the block, unless the block ends with an error that names a file in it."""
    folder, named = Path(tempfile.mkdtemp(prefix=prefix)), False
    try:
        yield folder
    except LightningError as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            shutil.rmtree(folder, ignore_errors=True)
