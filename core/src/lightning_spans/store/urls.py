"""The URLs and paths that stores are named by."""

from __future__ import annotations

import os


def absolute(store: str) -> str:
    """Return a store's URL or path so that it names the same file in every folder; one of no file is left as it is."""
    scheme, slashes, path = store.rpartition(":///")
    is_file = scheme.partition("+")[0] in {"", "sqlite"} and "://" not in path
    if not (is_file and path) or path.startswith((":memory:", "file:")):
        return store
    return f"{scheme}{slashes}{os.path.abspath(path)}"  # noqa: PTH100 - no link is followed
