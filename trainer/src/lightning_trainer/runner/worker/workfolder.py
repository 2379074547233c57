"""A folder of its own for an attempt: a clone or a copy of the user's, what was changed in it, and its end.

A git repository is cloned with its objects shared, so that neither its size nor its history costs anything, and what
an agent does to branches and stashes stays in the clone. Any other folder is copied. Changes are told by a repository
beside the folder, which the agent does not see: it may commit, or throw its own away.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_spans.errors import ConfigError
from lightning_trainer.runner.worker.command import filled, texts

LEFT_OVER: Final = "lightning-work-"  # how folders are named that are deleted when their process is no more
_OURS: Final = ("runs", "evals", "comparisons")  # folders that `lightning-rl` makes where it is started
_STORE: Final = "lightning.db"  # how the names of its store's files begin, there and in those folders
_LONGEST_DIFF: Final = 200_000  # characters kept of a diff: its beginning


class WorkFolderError(Exception):
    """A folder can't be made, or has grown too large; the message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """What folders are made of.

    Attributes:
        path: the user's folder.
        revision: of its repository; None: the commit that is checked out, or a folder that is no repository.
    """

    path: Path
    revision: str | None

    @property
    def repository(self) -> bool:
        """Whether it is the top of a git repository."""
        return (self.path / ".git").exists()


def source_of(text: str, task: Mapping[str, Any] | None = None) -> Source:
    """Read ``PATH`` or ``PATH@REVISION``, in which ``{field}`` stands for a task's.

    Raises:
        ConfigError: there is no such folder, or git is missing.
    """
    whole = filled(text, texts(task or {}))
    path, _, revision = whole.rpartition("@") if "@" in whole and not Path(whole).is_dir() else (whole, "", "")
    named = Path(path).expanduser()
    source = Source(named.resolve() if named.name == ".." else named.absolute(), revision or None)
    if not source.path.is_dir():
        raise ConfigError(f"workdir {whole!r}: there is no folder {source.path}. Start where it can be found.")
    if shutil.which("git") is None:
        raise ConfigError("workdir needs git, which tells what an agent changed. Install it.")
    if revision and not source.repository:
        raise ConfigError(f"workdir {whole!r}: {source.path} is no git repository, so it has no {revision}.")
    return source


def check(text: str) -> None:
    """See, before anything runs, that a workdir is there and that its attempts see what the user sees.

    Raises:
        ConfigError: it is not there, or holds changes that no attempt would have.
    """
    if "{" in text and not Path(text).is_dir():
        return  # each task has its own
    source = source_of(text)
    if source.repository and source.revision is None and _changed(source.path):
        raise ConfigError(
            f"workdir {text!r} has changes that are not committed, and an attempt would not see them. Commit or stash"
            f" them, or name what attempts begin with: {text}@HEAD."
        )


def _changed(folder: Path) -> bool:
    """Whether a repository holds what is not committed, beside what we write there ourselves."""
    entries = filter(None, _git(folder, "status", "--porcelain", "-z", "--untracked-files=all").split("\0"))
    return any(not (entry.startswith("?? ") and _lies_in_ours(folder / entry[3:])) for entry in entries)


def _lies_in_ours(path: Path) -> bool:
    return any(_ours(each.parent, each.name) for each in (path, *path.parents))


def _ours(folder: str | Path, name: str) -> bool:
    """Whether an entry of a folder is what `lightning-rl` makes where it was started: runs, stores and the like."""
    here = (name in _OURS or name.startswith(_STORE)) and Path(folder).resolve() == Path.cwd()
    return here and (name not in _OURS or any(any(Path(name).glob(f"{depth}/{_STORE}")) for depth in ("*", "*/*")))


def _ours_of(folder: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if _ours(folder, name)]


class WorkFolder:
    """One attempt's folder. All methods block.

    Args:
        source: what it is made of.
        most_bytes: it may not take more.

    Raises:
        WorkFolderError: it can't be made.
    """

    def __init__(self, source: Source, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._root = Path(tempfile.mkdtemp(prefix=f"{LEFT_OVER}{os.getpid()}-"))
        self.path = self._root / source.path.name
        self._git_dir = self._root / "changes.git"
        self._left_out_before: frozenset[str] = frozenset()  # a clone holds what is committed, and no more
        try:
            _git(self._root, "init", "--quiet", "--bare", str(self._git_dir))
            self._base = self._clone(source) if source.repository else self._copy(source)
        except BaseException:
            self.remove()
            raise

    def _clone(self, source: Source) -> str:
        wanted = source.revision or "HEAD"
        found = _git(
            source.path, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}", status=(0, 1)
        )
        if not (commit := found.strip()):
            raise WorkFolderError(f"{source.path} has no commit {wanted!r}")
        _git(self._root, "clone", "-q", "--shared", "--no-checkout", "-o", "origin", str(source.path), str(self.path))
        if source.revision is None:
            _git(self.path, "checkout", "--quiet")
        else:
            _git(self.path, "checkout", "--quiet", "--detach", commit)
        _git(self.path, "remote", "remove", "origin")  # nothing can be pushed to the user's
        self._name_author()
        self.check_size()
        objects = Path(_git(source.path, "rev-parse", "--git-path", "objects").strip())
        alternates = self._git_dir / "objects" / "info" / "alternates"
        alternates.write_text(f"{(source.path / objects).resolve()}\n")
        self._changes("read-tree", commit)
        return commit

    def _name_author(self) -> None:
        """Let an agent commit where nobody has said who he is."""
        if not _git(self.path, "config", "--get", "user.email", status=(0, 1)).strip():
            _git(self.path, "config", "user.name", "agent")
            _git(self.path, "config", "user.email", "agent@localhost")

    def _copy(self, source: Source) -> str:
        size = _size(source.path, self._most_bytes)
        if size > self._most_bytes:
            raise WorkFolderError(f"{source.path} takes more than {self._most_bytes} bytes. Raise workdir_size.")
        shutil.copytree(source.path, self.path, symlinks=True, ignore=_ours_of)
        self._add_all()
        self._left_out_before = self._left_out()
        return self._changes("write-tree").strip()

    def check_size(self) -> None:
        """See that it has not grown too large.

        Raises:
            WorkFolderError: it has.
        """
        if _size(self.path, self._most_bytes) > self._most_bytes:
            raise WorkFolderError(f"the work folder takes more than {self._most_bytes} bytes (workdir_size)")

    def diff(self) -> str:
        """Return what was changed since it was made, as a diff of git; ignored files are left out."""
        self._add_all()
        text = self._changes("diff-index", "--cached", "-p", "-M", self._base)
        if len(text) > _LONGEST_DIFF:
            return f"{text[:_LONGEST_DIFF]}\n... {len(text) - _LONGEST_DIFF} characters more"
        return text

    def restore(self, paths: Sequence[str]) -> None:
        """Put files back as they were, and take away what was added beside them, ignored or not.

        Files that were ignored when the folder was copied stay as they are now: nothing is known of what they were.

        Args:
            paths: globs of git, relative to the folder.

        Raises:
            WorkFolderError: a glob meets no file that was there.
        """
        for path in paths:
            self._add_all()
            spec = ("--", f":(glob){path}")
            added = self._changes("diff-index", "--cached", "--name-only", "-z", "--diff-filter=A", self._base, *spec)
            for name in {*filter(None, added.split("\0")), *self._left_out(*spec)} - self._left_out_before:
                _take_away(self.path / name)
            self._changes("checkout", "--quiet", self._base, *spec)

    def _add_all(self) -> None:
        """Take in what there is now, but for what git can't: a repository without a commit, a file we may not read."""
        if self.path.is_symlink() or not self.path.is_dir():  # the agent has taken it away, and all files with it
            self.path.unlink(missing_ok=True)
            self.path.mkdir()
        self._changes("add", "--all", "--ignore-errors", status=(0, 1))

    def _left_out(self, *spec: str) -> frozenset[str]:
        """Name what is not taken in: also what git ignores by whatever the agent wrote into a .gitignore."""
        found = self._changes("ls-files", "--others", "-z", *spec)
        return frozenset(filter(None, found.split("\0")))

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self._root, onerror=self._anyway)

    def _anyway(self, _: Any, path: str, __: Any) -> None:
        """Delete what an agent made read-only; the folder around ours is not ours to open or close."""
        if Path(path) == self._root:
            return
        try:
            Path(path).parent.chmod(0o700)
            Path(path).unlink()
        except OSError:
            return

    def _changes(self, *words: str, status: Sequence[int] = (0,)) -> str:
        places = {"GIT_DIR": str(self._git_dir), "GIT_WORK_TREE": str(self.path)}
        return _git(self.path, *words, environment=places, status=status)


def _take_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # a repository of its own
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_left_over(folder: Path | None = None) -> None:
    """Delete folders of processes that were killed and are no more."""
    for path in (folder or Path(tempfile.gettempdir())).glob(f"{LEFT_OVER}*-*"):
        number = path.name.removeprefix(LEFT_OVER).partition("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _git(folder: Path, *words: str, environment: Mapping[str, str] | None = None, status: Sequence[int] = (0,)) -> str:
    """Run git in a folder.

    Raises:
        WorkFolderError: it failed.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    settings = ("-c", "core.quotepath=false", "-c", "core.autocrlf=false", "-c", "advice.detachedHead=false")
    done = subprocess.run(  # noqa: S603 - our own words; a revision stands behind --end-of-options
        ["git", *settings, *words],  # noqa: S607 - the user's git
        cwd=folder,
        env={**own, **(environment or {}), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode not in status:
        told = done.stderr.decode(errors="replace").strip()[-2000:]
        raise WorkFolderError(f"git {words[0]} in {folder}: {told or f'exit status {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def _size(folder: Path, most: int) -> int:
    """Return the bytes of a folder's files; stop where they are too many."""
    total = 0
    for size in _sizes(folder):
        total += size
        if total > most:
            break
    return total


def _sizes(folder: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone, or not ours to read
        return
    for entry in entries:
        if _ours(folder, entry.name):
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
