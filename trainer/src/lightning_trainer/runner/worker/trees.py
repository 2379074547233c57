"""Folders that an agent may have written: walked, copied and removed without recursion and without following links.

Every name is opened relative to its parent folder, so a link that appears meanwhile leads nowhere.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Final, NamedTuple

MOST_LEVELS: Final = 200  # levels of nested folders
MOST_ENTRIES: Final = 1_000_000
_LONGEST_PATH: Final = 3_500  # bytes; Linux accepts paths of 4,096, and there is a prefix before ours
_FOLDER: Final = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_FILE: Final = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class WorkFolderError(Exception):
    """A folder cannot be created, or has grown too large; the message says why."""


class FolderEntry(NamedTuple):
    """An entry of a folder.

    Attributes:
        path: relative to the folder that is walked, with ``/`` between names.
        status: of the entry itself, not of a link's target.
    """

    path: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a folder."""
        return stat.S_ISDIR(self.status.st_mode)


def nothing(_: str) -> bool:
    """Whether to leave a path out: never."""
    return False


def walk(
    root: Path, pass_by: Callable[[str], bool] = nothing, *, mend: bool = False, strict: bool = False
) -> Iterator[FolderEntry]:
    """Yield all entries of a folder, each folder before its contents.

    Args:
        root: the folder.
        pass_by: whether not to look into the folder at a path.
        mend: open folders whose mode denies us access, once nothing works there any more; otherwise they count as
            empty.
        strict: a folder that cannot be read is an error instead.

    Raises:
        OSError: a folder cannot be read, if `strict`.
        WorkFolderError: it is nested too deep, or contains too many entries.
    """
    waiting, seen = [""], 0
    while waiting:
        folder = waiting.pop()
        for name, status in _entries(root, folder, MOST_ENTRIES - seen + 1, mend=mend, strict=strict):
            entry = FolderEntry(f"{folder}/{name}" if folder else name, status)
            seen += 1
            _check_bounds(root, entry.path, seen)
            yield entry
            if entry.is_folder and not pass_by(entry.path):
                waiting.append(entry.path)


def _check_bounds(root: Path, path: str, seen: int) -> None:
    if path.count("/") >= MOST_LEVELS or len(os.fsencode(path)) > _LONGEST_PATH:
        raise WorkFolderError(
            f"{root} contains folders nested deeper than {MOST_LEVELS} levels, or paths longer than {_LONGEST_PATH}"
            f" bytes. The first starts with {path[:80]!r}."
        )
    if seen > MOST_ENTRIES:
        raise WorkFolderError(f"{root} holds more than {MOST_ENTRIES:,} files and folders.")


def _entries(root: Path, folder: str, most: int, *, mend: bool, strict: bool) -> list[tuple[str, os.stat_result]]:
    found = []
    hidden = () if strict else (OSError,)
    with suppress(*hidden), _open_folder(root, folder, mend=mend) as descriptor, os.scandir(descriptor) as entries:
        for entry in islice(entries, most):
            with suppress(OSError):  # deleted meanwhile
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def total_size(root: Path, most: int, leave_out: Callable[[str], bool] = nothing, *, mend: bool = False) -> int:
    """Return the bytes of a folder's files, holes included; stop if they are more than `most`."""
    total = 0
    for entry in walk(root, leave_out, mend=mend):
        total += 0 if entry.is_folder or leave_out(entry.path) else entry.status.st_size
        if total > most:
            break
    return total


def copy_tree(source: Path, target: Path, leave_out: Callable[[str], bool]) -> None:
    """Copy a folder with its modes, times and links.

    Raises:
        WorkFolderError: something in it is not a file, folder or link, or it is nested too deep.
        OSError: something cannot be read or written.
    """
    target.mkdir()
    folders = [(target, source.stat())]
    for path, status in walk(source, leave_out, strict=True):
        if leave_out(path):
            continue
        if stat.S_ISDIR(status.st_mode):
            (target / path).mkdir()
            folders.append((target / path, status))
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            shutil.copy2(source / path, target / path, follow_symlinks=False)
        else:
            raise WorkFolderError(f"{source / path} is not a file, a folder or a link. Move it out of the folder.")
    for folder, status in reversed(folders):  # a read-only folder gets its mode when its contents are complete
        folder.chmod(stat.S_IMODE(status.st_mode))
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))


def read_entry(root: Path, entry: FolderEntry) -> bytes | None:
    """Return the content of a file, or the target of a link; None for what cannot be read or is neither."""
    folder, _, name = entry.path.rpartition("/")
    with suppress(OSError), _open_folder(root, folder) as within:
        if stat.S_ISLNK(entry.status.st_mode):
            return os.fsencode(os.readlink(name, dir_fd=within))
        if not stat.S_ISREG(entry.status.st_mode):
            return None
        return _read_regular(name, within, entry.status.st_size)
    return None


def read_file(root: Path, path: str, most: int) -> bytes | None:
    """Return up to `most` bytes of a regular file; None if there is none that can be read without following a link."""
    folder, _, name = path.rpartition("/")
    with suppress(OSError), _open_folder(root, folder) as within:
        return _read_regular(name, within, most)
    return None


def remove_file(root: Path, path: str) -> None:
    """Delete a file or a link, if there is one that can be reached without following a link.

    Raises:
        OSError: it cannot be deleted, or is a folder.
    """
    folder, _, name = path.rpartition("/")
    with suppress(FileNotFoundError, NotADirectoryError), _open_folder(root, folder) as within:
        os.unlink(name, dir_fd=within)


def _read_regular(name: str, within: int, most: int) -> bytes | None:
    with os.fdopen(os.open(name, _FILE, dir_fd=within), "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def write_entry(root: Path, path: str, mode: int, content: bytes) -> None:
    """Write a new file or link, in place of whatever is there or is in the way."""
    folder, _, name = path.rpartition("/")
    with _open_folder(root, folder, mend=True, make=True) as within:
        _remove(name, within)
        if stat.S_ISLNK(mode):
            os.symlink(os.fsdecode(content), name, dir_fd=within)
            return
        with os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=within), "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), stat.S_IMODE(mode))


def remove_entry(root: Path, path: str) -> None:
    """Delete what is at a path, and then the parent folders that are empty."""
    folder, _, name = path.rpartition("/")
    while name:
        with suppress(FileNotFoundError, NotADirectoryError), _open_folder(root, folder, mend=True) as within:
            _remove(name, within)
            if any(True for _ in os.scandir(within)):
                return
        folder, _, name = folder.rpartition("/")


def remove_tree(path: Path) -> None:
    """Delete a folder and all its contents, however deep; does nothing if there is none.

    Raises:
        OSError: something in it cannot be deleted.
    """
    with suppress(FileNotFoundError), _open_folder(path.parent.resolve(), "") as within:
        _remove(path.name, within)


def _remove(name: str, within: int) -> None:
    """Delete an entry of an open folder. Folders in it are moved to its top first, so that depth does not matter."""
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=within).st_mode):
            os.unlink(name, dir_fd=within)
            return
    except FileNotFoundError:
        return
    top = _open(name, within, mend=True)
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=within)


def _empty(top: int) -> None:
    numbers, mark = count(), secrets.token_hex(8)
    waiting = _empty_one(top, None, iter(()))
    while waiting:
        name = waiting.pop()
        inner = _open(name, top, mend=True)
        try:
            waiting += _empty_one(inner, top, (f"{mark}-{number}" for number in numbers))
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)


def _empty_one(folder: int, top: int | None, names: Iterator[str]) -> list[str]:
    """Delete a folder's files and move its folders to the top; return their names there."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    moved = []
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
        elif top is None:
            moved.append(name)
        else:
            os.close(_open(name, folder, mend=True))  # a folder without write permission cannot be moved
            moved.append(next(names))
            os.rename(name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    return moved


@contextmanager
def _open_folder(root: Path, folder: str, *, mend: bool = False, make: bool = False) -> Iterator[int]:
    """Open a folder step by step, so that no link on the path is followed; yield its descriptor."""
    descriptor = os.open(root, _FOLDER) if not mend else _open(str(root), None, mend=True)
    try:
        for name in filter(None, folder.split("/")):
            inner = _make(name, descriptor) if make else _open(name, descriptor, mend=mend)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _make(name: str, within: int) -> int:
    """Open a folder; create it in place of a file or a link."""
    try:
        return _open(name, within, mend=True)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # a link: systems do not agree on the error
        if not stat.S_ISLNK(os.lstat(name, dir_fd=within).st_mode):
            raise
    _remove(name, within)
    os.mkdir(name, 0o755, dir_fd=within)
    return _open(name, within, mend=True)


def _open(name: str, within: int | None, *, mend: bool) -> int:
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        if not mend:
            raise
        # Root is refused nothing, so its rights never change the mode of a link's target.
        os.chmod(name, 0o700, dir_fd=within)
        descriptor = os.open(name, _FOLDER, dir_fd=within)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mend and mode & 0o700 != 0o700:
        with suppress(OSError):
            os.fchmod(descriptor, mode | 0o700)
    return descriptor
