"""Graphs that a library brings along: their nodes are its own steps, and no agents of the user's.

A graph is a library's when the functions of all its nodes come from installed packages, LangChain's and LangGraph's own
apart, or when it is marked. LangChain's event of a graph does not have the graph. It is told in the call of the graph
itself, a few frames below.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "lightning:library"  # a tag that marks a graph as a library's
AGENTS: Final = "lightning:agents"  # and one whose nodes are agents, wherever it comes from
_FRAMEWORKS: Final = ("langchain", "langgraph")  # what is made by their functions is as much the user's
_STEPS: Final = frozenset({"stream", "astream"})  # of a graph, which tell of its start
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_FRAMES: Final = 8  # between these and the handler


def packages_of(graph: Any) -> frozenset[str]:
    """Return the packages that a library's graph comes from; none for a graph of the user's own."""
    found = {package for node in graph.nodes.values() for package in _packages(getattr(node, "bound", None))}
    return frozenset(found) if found and all(map(_is_installed, found)) else frozenset()


def graph_below() -> Any:
    """Return the graph whose start is told of now; some other or None where it is no graph that starts."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in _STEPS and str(frame.f_globals.get("__name__")).startswith("langgraph.pregel"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _packages(step: Any) -> Iterator[str]:
    """Return the top packages of the functions in a step of a graph, but for those of the frameworks."""
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
