"""The inputs of a run as hashes: data files, the program's code, and options."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from shlex import split
from typing import Any

from lightning_trainer.lineage.manifest import RunFacts
from lightning_trainer.lineage.reading import head_of


def read_facts(
    options: Mapping[str, Any], *, model: str, data: Iterable[Path | str | None], program: str | None
) -> RunFacts:
    """Return the inputs of a run.

    Args:
        options: all of them; values that are not JSON count as their text.
        model: the model that the run starts from.
        data: data files, folders and patterns; stores and None are ignored.
        program: ``module:function``, or a command; None: no program runs.
    """
    return RunFacts(
        model=model,
        parent=head_of(Path(model).expanduser()),
        data=[hashed for name in data if name is not None for hashed in hash_files(str(name))],
        code=_hash_program(program) if program else [],
        options=digest_of(options),
    )


def digest_of(values: Any) -> str:
    """Return 64 hex digits that change when any of the values changes."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def hash_files(name: str) -> list[dict[str, str]]:
    """Hash a file, all files of a folder, or those that match a pattern."""
    path = Path(name)
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())
    else:
        files = [path] if path.is_file() else [Path(each) for each in sorted(glob(name, recursive=True))]  # noqa: PTH207 - it may be absolute
    return [{"path": str(file), "sha256": _hash_file(file)} for file in files if file.is_file()]


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_program(program: str) -> list[dict[str, str]]:
    """Hash the module or package of a function, or the files that a command names."""
    module, colon, _ = program.partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        return [{"path": str(path), "sha256": _hash_file(path)} for path in _files_of(module)]
    files = [word for word in split(program) if os.path.isfile(word)]  # noqa: PTH113 - a Path's raises OSError if the word is too long for a name
    return [hashed for word in files for hashed in hash_files(word)]


def _files_of(module: str) -> list[Path]:
    """Return the source files of a module without importing it; for a package, all of its files."""
    top, *rest = module.split(".")
    for root in dict.fromkeys([Path.cwd(), *map(Path, sys.path)]):
        if (root / f"{top}.py").is_file() and not rest:
            return [root / f"{top}.py"]
        if (root / top).is_dir() and ((root / top / "__init__.py").is_file() or rest):
            return sorted((root / top).rglob("*.py"))
    return []
