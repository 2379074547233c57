"""A folder for the output of agents, for commands without their own folder."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_spans.errors import LightningError

_logger = logging.getLogger("lightning_trainer")


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a folder that is removed after the block, unless a warning or the final error in it names the folder."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    told = _FolderMention(str(folder))
    _logger.addHandler(told)
    try:
        yield folder
    except LightningError as error:
        told.named |= str(folder) in str(error)
        raise
    finally:
        _logger.removeHandler(told)
        if not told.named:
            shutil.rmtree(folder, ignore_errors=True)


class _FolderMention(logging.Handler):
    """Log handler that notices whether a warning named a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder
        self.named = False

    def emit(self, record: logging.LogRecord) -> None:
        """Look for the folder in a message."""
        self.named |= self._folder in record.getMessage()
