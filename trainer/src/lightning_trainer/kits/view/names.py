"""The labels of agents on pages: an agent's name, or its path if another has the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.agents import label, labels
from lightning_trainer.kits.view.runs import Run


def names_of(paths: Iterable[str | None], chosen: Sequence[str] | None) -> Mapping[str | None, str | None]:
    """Return by path, in the given order, the label of each agent among the others.

    Args:
        paths: of all of them; None stands for an unknown agent.
        chosen: names or globs of the agents that the run trains: one that is selected by its path is labelled by it.
    """
    order = dict.fromkeys(paths)
    known = labels(path for path in order if path is not None)
    return {path: path if path is None or label(path, chosen) == path else known[path] for path in order}


def names_in(trace: Trace, chosen: Sequence[str] | None) -> Mapping[Node, str | None]:
    """Return the label of the agent of each span of a trace."""
    paths = {node: node.path for node in trace}
    names = names_of(paths.values(), chosen)
    return {node: names[path] for node, path in paths.items()}


def chosen_by(run: Run) -> tuple[str, ...] | None:
    """Return the names or globs of the agents that a run trains; None: all, or unknown."""
    agents = run.options.get("agents")
    return tuple(str(each) for each in agents) if isinstance(agents, list) else None
