"""The state of a work folder when its attempt began, for finding changes and restoring files.

git never looks into a folder that an agent has written to: a repository in there, or an attribute, would make it run
programs that the agent chose. Files are read here, byte for byte, and passed to a repository of ours that has no work
tree and no settings. The agent does not see it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lightning_trainer.runner.worker.git import SEALED, read_blobs, run_git
from lightning_trainer.runner.worker.trees import (
    FolderEntry,
    WorkFolderError,
    read_entry,
    remove_entry,
    walk,
    write_entry,
)

_IGNORE: Final = ".gitignore"
_LARGEST_FILE: Final = 4 << 20  # bytes of a file that a diff reads; a larger one is only reported as different
_LARGEST_DIFF: Final = 32 << 20  # bytes that a diff reads in total
_SAME_TICK_NS: Final = 50_000_000  # a file changed again within a tick of the file system's clock has the same times
_GONE: Final = 0  # the mode that removes a path from git's index
_GLOB: Final = re.compile(r"(?<![^/])\*\*/|\*+|\?|\[[!^]?\]?[^\]]*\]|\\.|.", re.DOTALL)


class _File(NamedTuple):
    """The original state of a file or a link.

    Attributes:
        mode: its type and its mode.
        blob: the name of its content.
        stamp: the fields of its status.
        fresh: it was so new that a later change might not show in the status.
    """

    mode: int
    blob: str
    stamp: tuple[int, ...] = ()
    fresh: bool = False

    def is_surely(self, status: os.stat_result) -> bool:
        """Whether its status alone shows that it has not changed."""
        return self.stamp == _stamp(status) and not self.fresh

    def is_surely_not(self, status: os.stat_result) -> bool:
        """Whether its status alone shows a change, or that it has a second name through which it can be changed."""
        return self.stamp[:3] != _stamp(status)[:3] or status.st_nlink > 1


class Baseline:
    """The state of a folder when this was created. All methods block.

    Args:
        folder: the folder, in which nothing has worked yet.
        place: a folder of ours.
        commit: commit of the repository that was cloned; None: the folder is a copy.
        objects: the objects of that repository.

    Raises:
        WorkFolderError: git failed, or the folder cannot be read.
    """

    def __init__(self, folder: Path, place: Path, commit: str | None = None, objects: Path | None = None) -> None:
        self._git_dir, self._rules = place / "changes.git", place / "rules"
        self._rules.mkdir()
        self._init(commit, objects)
        known = self._blobs_of(commit) if commit else {}
        entries = _outside_git(folder)
        self._keep_rules(folder, entries)
        paths = [entry.path for entry in entries if _can_be_stored(entry)]
        ignored = (
            frozenset() if commit else self._ignored_paths(paths)
        )  # a new clone contains what is committed, and no more
        kept = [entry for entry in entries if _can_be_stored(entry) and entry.path not in ignored]
        newest = max((entry.status.st_ctime_ns for entry in kept), default=0)
        self._files = {entry.path: self._file(folder, entry, known, newest) for entry in kept}
        self._left_out = frozenset(entry.path for entry in entries) - self._files.keys()
        self._git("update-index", "-z", "--index-info", given=_index(self._files.items()))
        self._tree = self._git("write-tree").decode().strip()

    def _init(self, commit: str | None, objects: Path | None) -> None:
        self._hash = "sha256" if commit and len(commit) == 64 else "sha1"
        words = ("init", "-q", "--bare", f"--object-format={self._hash}", str(self._git_dir))
        run_git(self._rules, *words, environment=SEALED)
        if objects is not None:
            (self._git_dir / "objects" / "info" / "alternates").write_text(f"{objects}\n")

    def _blobs_of(self, commit: str) -> dict[str, str]:
        lines = self._git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")
        parts = [line.split(b"\t", 1) for line in lines if line]
        return {os.fsdecode(path): told.split()[2].decode() for told, path in parts}

    def _keep_rules(self, folder: Path, entries: Sequence[FolderEntry]) -> None:
        """Keep the rules of which files git ignores: what an agent writes there later hides nothing."""
        for entry in entries:
            if entry.path.rpartition("/")[2] == _IGNORE and (content := read_entry(folder, entry)) is not None:
                write_entry(self._rules, entry.path, stat.S_IFREG | 0o600, content)

    def _file(self, folder: Path, entry: FolderEntry, known: Mapping[str, str], newest: int) -> _File:
        if (content := read_entry(folder, entry)) is None:
            raise WorkFolderError(f"{folder.name}/{entry.path} can't be read.")
        blob = self._name_of(content)
        if known.get(entry.path) != blob:
            self._store(blob, content)
        fresh = entry.status.st_ctime_ns >= newest - _SAME_TICK_NS
        return _File(entry.status.st_mode, blob, _stamp(entry.status), fresh)

    def _name_of(self, content: bytes) -> str:
        return hashlib.new(self._hash, b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def _store(self, blob: str, content: bytes) -> None:
        path = self._git_dir / "objects" / blob[:2] / blob[2:]
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(zlib.compress(b"blob %d\0" % len(content) + content, 1))

    def diff(self, folder: Path, most: int) -> str:
        """Return what was changed since, as a git diff, cut at `most` bytes; ignored files are left out.

        Only changed files are read, and no more of them than fits into a diff.

        Raises:
            WorkFolderError: the folder is nested too deep or contains too much, or git failed.
        """
        there = {entry.path: entry for entry in _outside_git(folder, mend=True) if _can_be_stored(entry)}
        new = there.keys() - self._files.keys() - self._left_out
        wanted = sorted((there.keys() & self._files.keys()) | (new - self._ignored_paths(new)))
        changed, room = {}, _LARGEST_DIFF
        for path in wanted:
            if path not in self._files or not self._files[path].is_surely(there[path].status):
                changed[path], read = self._store_changed(folder, there[path], room)
                room -= read
        zeros = "0" * hashlib.new(self._hash).digest_size * 2
        gone = {path: _File(_GONE, zeros) for path in self._files.keys() - there.keys()}
        self._git("read-tree", self._tree)
        self._git("update-index", "-z", "--index-info", given=_index(gone.items()))
        self._git("update-index", "-z", "--index-info", given=_index(changed.items()))
        words = ("diff-index", "--cached", "-p", "-M", "-l200", "--no-ext-diff", "--no-textconv", "--no-color")
        return self._git(*words, self._tree, most=most).decode(errors="replace")

    def _store_changed(self, folder: Path, entry: FolderEntry, room: int) -> tuple[_File, int]:
        """Store the content of a file that may have changed; return it, and how many bytes were read."""
        status, before = entry.status, self._files.get(entry.path)
        content = read_entry(folder, entry) if status.st_size <= min(_LARGEST_FILE, room) else None
        if content is None and before is not None and before.stamp == _stamp(status):
            return before, 0
        kept = content
        if kept is None:  # a zero byte makes it binary for git, and its times make it differ
            kept = b"\0%d bytes, not read: %r" % (status.st_size, _stamp(status))
        self._store(blob := self._name_of(kept), kept)
        return _File(status.st_mode, blob), len(content or b"")

    def restore(self, folder: Path, globs: Sequence[str]) -> None:
        """Restore the original files, and remove files that were added next to them, ignored or not.

        Files that were ignored when a folder was copied are left unchanged: their original state is unknown.

        Args:
            folder: the same as at the start.
            globs: like git's, relative to the folder: ``*`` ends at a slash, ``**`` does not.

        Raises:
            WorkFolderError: a glob matches no original file, or a file cannot be restored.
        """
        matches = [_matcher(glob) for glob in globs]
        for glob, match in zip(globs, matches, strict=True):
            if not any(map(match, self._files)):
                raise WorkFolderError(f"restore {glob!r} names no file that was in {folder.name} at the start.")
        now = {entry.path: entry for entry in _outside_git(folder, mend=True)}
        try:
            for path in now.keys() - self._files.keys() - self._left_out:
                if any(match(path) for match in matches):
                    remove_entry(folder, path)
            wanted = [path for path in self._files if any(match(path) for match in matches)]
            changed = [path for path in wanted if path not in now or not self._is_unchanged(folder, now[path])]
            blobs = read_blobs(self._git_dir, (self._files[path].blob for path in changed))
            for path, content in zip(changed, blobs, strict=True):
                write_entry(folder, path, self._files[path].mode, content)
        except OSError as error:
            raise WorkFolderError(f"files of {folder.name} can't be restored: {error}.") from None

    def _is_unchanged(self, folder: Path, entry: FolderEntry) -> bool:
        before = self._files[entry.path]
        if before.is_surely(entry.status) or before.is_surely_not(entry.status):
            return before.is_surely(entry.status)
        content = read_entry(folder, entry)
        return content is not None and self._name_of(content) == before.blob

    def _ignored_paths(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the paths that git ignores, by the original rules and the user's own."""
        words = ("check-ignore", "-z", "--stdin", "--no-index")
        places = {"GIT_DIR": str(self._git_dir), "GIT_WORK_TREE": str(self._rules)}
        given = b"".join(b"./" + os.fsencode(path) + b"\0" for path in paths)  # otherwise :( would start pathspec magic
        output = run_git(self._rules, *words, environment=places, status=(0, 1), given=given)
        return frozenset(os.fsdecode(path.removeprefix(b"./")) for path in output.split(b"\0") if path)

    def _git(self, *words: str, given: bytes = b"", most: int | None = None) -> bytes:
        sealed = {**SEALED, "GIT_DIR": str(self._git_dir)}
        return run_git(self._git_dir, *words, environment=sealed, given=given, most=most)


def _outside_git(folder: Path, *, mend: bool = False) -> list[FolderEntry]:
    """Return the files in a folder, without the folder's own ``.git``; of a nested ``.git``, only the entry itself."""
    entries = walk(folder, _is_git, mend=mend)
    return [entry for entry in entries if entry.path.lower() != ".git" and (not entry.is_folder or _is_git(entry.path))]


def _is_git(path: str) -> bool:
    return path.rpartition("/")[2].lower() == ".git"


def _can_be_stored(entry: FolderEntry) -> bool:
    """Whether git can store an entry: a file or a link, unless git reserves the name for itself."""
    if _is_git(entry.path):
        return False
    mode, name = entry.status.st_mode, entry.path.rpartition("/")[2].lower()
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and name != ".gitmodules")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _index(files: Iterable[tuple[str, _File]]) -> bytes:
    """Return lines for git's index."""
    return b"".join(
        f"{_git_mode(file.mode)} {file.blob}\t".encode() + os.fsencode(path) + b"\0" for path, file in files
    )


def _git_mode(mode: int) -> str:
    if mode == _GONE or stat.S_ISLNK(mode):
        return "0" if mode == _GONE else "120000"
    return "100755" if mode & stat.S_IXUSR else "100644"


def _matcher(glob: str) -> Callable[[str], bool]:
    """Return a function that tests whether a git glob matches a path; without wildcards, also a path inside it.

    Raises:
        WorkFolderError: it is not a glob.
    """
    plain = glob.removeprefix("./").rstrip("/")
    inside = "" if set(plain) & set("*?[\\") else "(?:/.*)?"
    try:
        expression = re.compile(_GLOB.sub(_as_expression, plain) + inside, re.DOTALL)
    except re.error as error:
        raise WorkFolderError(f"restore {glob!r} is not a glob pattern: {error}.") from None
    return lambda path: expression.fullmatch(path) is not None


def _as_expression(part: re.Match[str]) -> str:
    text = part[0]
    if text == "**/":
        return "(?:.*/)?"
    if text == "**" and part.end() == len(part.string) and part.string[part.start() - 1 : part.start()] in ("", "/"):
        return ".+"
    if text[0] == "*":
        return "[^/]*"
    if text == "?":
        return "[^/]"
    if text[0] == "[" and len(text) > 1:
        negated = text[1] in "!^"
        members = text[2 if negated else 1 : -1].replace("[", "\\[")
        return f"(?!/)[{'^' if negated else ''}{members}]"
    return re.escape(text[-1])
