"""Graphs that come from a library: their nodes are the library's steps, not the user's agents.

A graph is a library's when the functions of all its nodes come from installed packages (except LangChain's and
LangGraph's own), or when it is marked. LangChain's event for a graph does not contain the graph object; the code finds
it in the call of the graph itself, a few frames up the stack.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "lightning:library"  # a tag that marks a graph as a library's
AGENTS: Final = "lightning:agents"  # a tag that marks a graph's nodes as agents, wherever it comes from
_FRAMEWORKS: Final = ("langchain", "langgraph")  # a graph made by these packages' functions belongs to the user
_STEPS: Final = frozenset({"stream", "astream"})  # methods of a graph that report its start
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_FRAMES: Final = 8  # frames between these methods and the handler


def packages_of(graph: Any) -> frozenset[str]:
    """Return the packages that a library's graph comes from; empty for the user's own graph."""
    found = {package for node in graph.nodes.values() for package in _packages(getattr(node, "bound", None))}
    return frozenset(found) if found and all(map(_is_installed, found)) else frozenset()


def graph_below() -> Any:
    """Return the graph whose start is being reported; another object or None if no graph starts."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in _STEPS and str(frame.f_globals.get("__name__")).startswith("langgraph.pregel"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _packages(step: Any) -> Iterator[str]:
    """Return the top-level packages of the functions in a graph's step, except the frameworks' own."""
    for part in getattr(step, "steps", None) or (step,):
        function = getattr(part, "func", None) or getattr(part, "afunc", None) or part
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__module__", None) or type(function).__module__
        package = str(module).partition(".")[0]
        if not package.startswith(_FRAMEWORKS):
            yield package


@functools.lru_cache(256)
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)
