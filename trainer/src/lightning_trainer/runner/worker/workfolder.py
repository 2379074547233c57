"""A separate folder for an attempt: a clone or a copy of the user's, the changes in it, and its removal.

A git repository is cloned with its objects shared, so that neither its size nor its history costs anything, and what an
agent does to branches and stashes stays in the clone. Any other folder is copied. Changes are read from the files
alone: an agent may commit, or delete its repository.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final

import psutil

from lightning_spans.errors import ConfigError
from lightning_trainer.runner.worker.baseline import Baseline
from lightning_trainer.runner.worker.command import fill_fields, texts
from lightning_trainer.runner.worker.git import run_git
from lightning_trainer.runner.worker.trees import WorkFolderError, copy_tree, remove_tree, total_size

logger = logging.getLogger("lightning_trainer")

LEFT_OVER: Final = "lightning-work-"  # name prefix of folders that are deleted once their process no longer exists
# What `lightning-rl` writes is no part of a work folder: keys, stores, the output of agents and undelivered spans.
_OURS: Final = re.compile(r"\.?lightning\.key(\..+)?|lightning\.db.*|lightning-(logs|spool)")
# So are these folders in the folder where it was started, if they contain one of these files: a user may have others.
_WITH_STORES: Final = ("*/lightning.db", "*/*/lightning.db")
_FOLDERS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("runs", "evals", "comparisons", "attacks"), _WITH_STORES),
    "loops": ("*/*/options.json",),
}
# A submodule is a repository of others, and git would run what its settings name.
_STATUS: Final = ("status", "--porcelain", "-z", "--untracked-files=all", "--ignore-submodules=dirty")
_LONGEST_DIFF: Final = 200_000  # characters kept from the beginning of a diff


@dataclass(frozen=True, slots=True)
class Source:
    """The source of work folders.

    Attributes:
        path: the user's folder.
        revision: of its repository; None: the commit that is checked out, or the folder is not a repository.
    """

    path: Path
    revision: str | None

    @property
    def repository(self) -> bool:
        """Whether the folder is the top of a git repository."""
        return (self.path / ".git").exists()


def source_of(text: str, task: Mapping[str, Any] | None = None) -> Source:
    """Parse ``PATH`` or ``PATH@REVISION``, in which ``{field}`` stands for a field of the task.

    Raises:
        ConfigError: there is no such folder, or git is missing.
    """
    named, template = "", text
    if "@" in text and not Path(fill_fields(text, texts(task or {}))).is_dir():
        template, _, named = text.rpartition("@")
    revision = fill_fields(named, texts(task or {}))
    source = Source(_path_of(template, task or {}), revision or None)
    whole = f"{source.path}@{revision}" if revision else f"{source.path}"
    if not source.path.is_dir():
        raise ConfigError(f"workdir {whole!r}: there is no folder {source.path}. Start where it can be found.")
    if shutil.which("git") is None:
        raise ConfigError("workdir needs git, which finds what an agent changed. Install it.")
    if revision and not source.repository:
        raise ConfigError(f"workdir {whole!r}: {source.path} is not a git repository, so it has no {revision}.")
    return source


def _path_of(template: str, task: Mapping[str, Any]) -> Path:
    """Fill in a path. The values of a task stay inside the folder that is named before its first field.

    Raises:
        ConfigError: it leads out of there, or names nothing in it.
    """
    whole = os.path.expanduser(template)  # noqa: PTH111 - of the template, and of no field
    path = fill_fields(whole, texts(task))
    if path == whole:
        named = Path(path)
        return named.resolve() if named.name == ".." else named.absolute()
    folder, placed = os.path.abspath(os.path.dirname(whole.partition("{")[0])), os.path.abspath(path)  # noqa: PTH100, PTH120
    if "\0" in placed or not placed.startswith(f"{folder.rstrip(os.sep)}{os.sep}"):
        raise ConfigError(
            f"workdir {template!r}: a task's field makes it {path!r}, which is not inside {folder}. Name the folder"
            " that holds all of them before the field, such as /data/repos/{repo}."
        )
    return Path(placed)


def check(text: str, withheld: Collection[Path] = ()) -> None:
    """Make sure, before anything runs, that a workdir exists and that its attempts see what the user sees.

    Args:
        text: the option.
        withheld: files and folders that are ours, so that they do not count as changes.

    Raises:
        ConfigError: it does not exist, or contains changes that no attempt would have.
    """
    if "{" in text and not Path(text).is_dir():
        return  # each task has its own
    source = source_of(text)
    if source.repository and source.revision is None and _has_changes(source.path, withheld):
        raise ConfigError(
            f"workdir {text!r} has changes that are not committed, and an attempt would not see them. Commit or stash"
            f" them, or name the commit that attempts start from: {text}@HEAD."
        )


def _has_changes(folder: Path, withheld: Collection[Path]) -> bool:
    """Whether a repository contains uncommitted changes, apart from what we write there ourselves."""
    ours = partial(_is_ours, folder.resolve(), withheld)
    for entry in filter(None, _git(folder, *_STATUS).split("\0")):
        path = PurePath(entry[3:])
        if not (entry.startswith("?? ") and any(ours(str(each)) for each in (path, *path.parents[:-1]))):
            return True
    return False


def _is_ours(folder: Path, withheld: Collection[Path], path: str) -> bool:
    """Whether `lightning-rl` wrote an entry of a folder: a key, a run, a store and the like.

    Args:
        folder: without links.
        withheld: files and folders that are ours, whatever their names.
        path: of the entry, relative to the folder.
    """
    whole = folder / path
    if whole in withheld or _OURS.fullmatch(whole.name):
        return True
    return whole.parent == Path.cwd() and any(any(whole.glob(each)) for each in _FOLDERS.get(whole.name, ()))


class WorkFolder:
    """One attempt's folder. All methods block.

    Args:
        source: the folder that is cloned or copied.
        most_bytes: its maximum size.
        withheld: files and folders that are not copied.

    Raises:
        WorkFolderError: it cannot be created.
    """

    def __init__(self, source: Source, most_bytes: int, withheld: Collection[Path] = ()) -> None:
        self._most_bytes = most_bytes
        self._withheld = withheld
        mark = f"{LEFT_OVER}{os.getpid()}-"
        self._root, self._beside = Path(tempfile.mkdtemp(prefix=mark)), Path(tempfile.mkdtemp(prefix=mark))
        self.path = self._root / source.path.name
        try:
            self._baseline = self._clone(source) if source.repository else self._copy(source)
        except OSError as error:
            self.remove()
            raise WorkFolderError(f"{source.path} can't be copied: {error}.") from None
        except BaseException:
            self.remove()
            raise

    def _clone(self, source: Source) -> Baseline:
        wanted = source.revision or "HEAD"
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
        if not (commit := _git(source.path, *words, status=(0, 1)).strip()):
            raise WorkFolderError(f"{source.path} has no commit {wanted!r}")
        _git(self._root, "clone", "-q", "--shared", "--no-checkout", "-o", "origin", str(source.path), str(self.path))
        if source.revision is None:
            _git(self.path, "checkout", "--quiet")
        else:
            _git(self.path, "checkout", "--quiet", "--detach", commit)
        _git(self.path, "remote", "remove", "origin")  # nothing can be pushed to the user's repository
        self._name_author()
        self.check_size()
        objects = Path(_git(source.path, "rev-parse", "--git-path", "objects").strip())
        return Baseline(self.path, self._beside, commit, (source.path / objects).resolve())

    def _name_author(self) -> None:
        """Let an agent commit if no author is configured."""
        if not _git(self.path, "config", "--get", "user.email", status=(0, 1)).strip():
            _git(self.path, "config", "user.name", "agent")
            _git(self.path, "config", "user.email", "agent@localhost")

    def _copy(self, source: Source) -> Baseline:
        folder = source.path.resolve()
        leave_out = partial(_is_ours, folder, self._withheld)
        if total_size(folder, self._most_bytes, leave_out) > self._most_bytes:
            raise WorkFolderError(f"{source.path} takes more than {self._most_bytes} bytes. Raise workdir_size.")
        copy_tree(folder, self.path, leave_out)
        return Baseline(self.path, self._beside)

    def check_size(self, *, ended: bool = False) -> None:
        """Make sure that the folder has not grown too large.

        Args:
            ended: nothing works there any more, so that folders whose mode denies us access may be opened.

        Raises:
            WorkFolderError: it has, or it is nested too deep.
        """
        if not self.path.is_symlink() and total_size(self.path, self._most_bytes, mend=ended) > self._most_bytes:
            raise WorkFolderError(f"the work folder takes more than {self._most_bytes} bytes (workdir_size)")

    def diff(self) -> str:
        """Return what was changed since the folder was created, as a git diff; ignored files are left out.

        Raises:
            WorkFolderError: it has grown too large, or git failed.
        """
        with self._mend_folder():
            self.check_size(ended=True)
            text = self._baseline.diff(self.path, _LONGEST_DIFF + 1)
        return text if len(text) <= _LONGEST_DIFF else f"{text[:_LONGEST_DIFF]}\n... and more"

    def restore(self, paths: Sequence[str]) -> None:
        """Restore the original files, and remove files that were added next to them: see `Baseline.restore`.

        Raises:
            WorkFolderError: a glob matches no original file, or a file cannot be restored.
        """
        with self._mend_folder():
            self._baseline.restore(self.path, paths)

    @contextmanager
    def _mend_folder(self) -> Iterator[None]:
        """Create the folder again if the agent has removed it or its parent, and all files with it."""
        try:
            for folder in (self._root, self.path):
                if folder.is_symlink() or not folder.is_dir():
                    folder.unlink(missing_ok=True)
                    folder.mkdir(0o700 if folder == self._root else 0o777)
            yield
        except OSError as error:
            raise WorkFolderError(f"the work folder was partly deleted: {error}") from None

    def remove(self) -> None:
        """Delete the folder; what cannot be deleted is reported in the log."""
        for folder in (self._root, self._beside):
            remove_folder(folder)


def remove_left_over(folder: Path | None = None) -> None:
    """Delete folders of this user's processes that were killed and no longer exist."""
    for path in (folder or Path(tempfile.gettempdir())).glob(f"{LEFT_OVER}*-*"):
        number = path.name.removeprefix(LEFT_OVER).partition("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)) and _is_this_users(path):
            remove_folder(path)


def _is_this_users(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:  # another process deletes it, too
        return False


def remove_folder(folder: Path) -> None:
    """Delete a folder, whatever its contents; what cannot be deleted is reported in the log."""
    try:
        remove_tree(folder)
    except OSError as error:
        logger.warning("the work folder %s can't be deleted: %s", folder, error)


def _git(folder: Path, *words: str, status: Sequence[int] = (0,)) -> str:
    """Run git in a folder in which no agent has worked yet."""
    return os.fsdecode(run_git(folder, *words, status=status))
