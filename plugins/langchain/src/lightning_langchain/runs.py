"""LangChain's runs as a tree: which agent is at work in each, and which of them are spans.

LangChain reports a run for every step; most are plumbing. An agent is a named graph (`create_agent(name=)`,
`compile(name=)`) or a node of a graph, but not the inner nodes of an agent's own loop (``model``, ``tools``). That a
run is a graph shows when its first node starts, so its span is begun then, with the time at which the run began.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context

from lightning_langchain.asked import Asked, Waiting
from lightning_spans import spans as names
from lightning_spans.context import current_agent, settled
from lightning_spans.recorder import current_span
from lightning_spans.stays import Stay

if TYPE_CHECKING:
    from uuid import UUID

    from lightning_spans.recorder import OpenSpan, Recorder

UNNAMED: Final = "LangGraph"  # what LangGraph calls a graph that has no name
_LOOP: Final = frozenset(
    {"model", "agent", "tools", "pre_model_hook", "post_model_hook", "generate_structured_response"}
)
_MIDDLEWARE: Final = (".before_agent", ".before_model", ".after_model", ".after_agent")


class Run(Stay):
    """One run of LangChain."""

    __slots__ = (
        "agent", "asked", "cached", "context", "graph", "inner", "kind", "lc_agent", "made", "metadata", "model",
        "name", "namespace", "parent", "span", "start_ns",
    )  # fmt: skip

    def __init__(self, parent: Run | None, kind: str, name: str, metadata: Mapping[str, Any]) -> None:
        here = settled()
        super().__init__(here)
        self.parent = parent
        # Of the whole tree: its open runs, and the tool calls that models asked for, until they are made.
        self.inner: dict[UUID, Run] = {} if parent is None else parent.inner
        self.asked: list[Asked] = [] if parent is None else parent.asked
        self.made: Asked | None = None  # of a tool: what was asked for
        self.kind = kind  # chain, tool or chat
        self.name = name
        self.metadata = metadata
        self.namespace: str | None = metadata.get("langgraph_checkpoint_ns")
        self.lc_agent: str | None = metadata.get("lc_agent_name")
        self.agent: str | None = None  # of a graph, a node or a tool: who is at work in it
        self.context: Context = here
        self.start_ns = time.time_ns()
        self.graph = False
        self.span: OpenSpan | None = None
        self.model = ""  # of a chat run: the class of its model
        self.cached = False  # of a chat run: a cache answered


class Runs:
    """The runs that are open, and the spans of those that are agents or tools."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[UUID, Run] = {}
        self._waiting = Waiting()
        self._lock = threading.RLock()  # branches of one graph that start at once begin its span once

    def begin(self, run_id: UUID, parent_id: UUID | None, kind: str, name: str, metadata: Mapping[str, Any]) -> Run:
        """Take a run that starts."""
        run = Run(self._open.get(parent_id) if parent_id is not None else None, kind, name, metadata)
        if run.parent is None:
            self._waiting.begin(run)
        self._open[run_id] = run
        run.inner[run_id] = run
        return run

    def end(self, run_id: UUID) -> Run | None:
        """Take a run that ends; the context that it was entered with is left, its span is still the caller's to end."""
        run = self._open.pop(run_id, None)
        if run is None:
            return None
        run.leave()
        run.inner.pop(run_id, None)
        if run.parent is None:
            for inner_id, inner in reversed(list(run.inner.items())):  # cancelled without a word
                self.end(inner_id)
                if inner.call is not None:
                    inner.call.end(error=asyncio.CancelledError())
                if inner.span is not None:
                    inner.span.end()
            self._waiting.end(run)
        return run

    def end_spans(self) -> None:
        """End every span that is open: recording stops."""
        for run in reversed(list(self._open.values())):
            if run.call is not None and run.call.named:
                run.call.end()
            if run.span is not None:
                run.span.end()

    def is_node(self, run: Run) -> bool:
        """Whether a chain is a node of a graph: its checkpoint namespace is its own."""
        return run.namespace is not None and (run.parent is None or run.namespace != run.parent.namespace)

    def begin_node(self, run: Run) -> None:
        """Find the agent of a node, begin its span if it is an agent of its own, and enter it."""
        node = str(run.metadata.get("langgraph_node") or run.name)
        graph = run.parent
        with self._lock:
            if graph is not None and not graph.graph:
                self._begin_graph(graph)
        if _is_of_loop(node, run, graph):
            self._name_loop(run, graph)
        else:
            self._begin_agent(run, node)
        run.enter(self.place(run))

    def _begin_graph(self, graph: Run) -> None:
        graph.graph = True
        graph.agent = current_agent(self.place(graph.parent, graph.context))
        above = graph.parent.lc_agent if graph.parent is not None else None
        own = graph.lc_agent if graph.lc_agent and (graph.lc_agent != above or graph.name == above) else graph.name
        if own != UNNAMED:
            self._begin_agent(graph, own)

    def _name_loop(self, run: Run, graph: Run | None) -> None:
        """Find the agent whose loop a node is part of: the named graph, else what is around it, else the graph."""
        if graph is None:  # recording began inside it
            if run.lc_agent:
                self._begin_agent(run, run.lc_agent)
            return
        if graph.agent is None and _made_by_langchain(run):
            with self._lock:
                if graph.agent is None:
                    self._begin_agent(graph, UNNAMED)
        run.agent = graph.agent

    def _begin_agent(self, run: Run, name: str) -> None:
        """Begin an agent's span, unless the same agent is at work right around it (a node that holds a named graph)."""
        around = run.parent
        while around is not None and around.span is None:
            around = around.parent
        run.agent = name
        if around is not None and around.kind == "chain" and around.agent == name:
            return
        context = self.place(run.parent, run.context)
        run.span = self._recorder.start(
            names.INVOKE_AGENT,
            name,
            agent=name,
            context=context,
            start_ns=run.start_ns,
            attributes={
                names.FRAMEWORK: "langchain",
                names.CONVERSATION_ID: run.metadata.get("thread_id"),
            },
        )

    def home(self, run: Run | None) -> OpenSpan | None:
        """Give the span that what happens in a run belongs under; None for what stands alone."""
        while run is not None:
            if run.span is not None:
                return run.span
            if run.parent is None and run.kind == "chain":
                return self._begin_workflow(run)
            run = run.parent
        return None

    def _begin_workflow(self, root: Run) -> OpenSpan | None:
        with self._lock:
            if root.span is None:
                context = settled(root.context)
                if (around := current_span(context)) is not None:
                    return around
                root.span = self._recorder.start(
                    names.INVOKE_WORKFLOW,
                    root.name,
                    context=context,
                    start_ns=root.start_ns,
                    attributes={
                        names.FRAMEWORK: "langchain",
                        names.CONVERSATION_ID: root.metadata.get("thread_id"),
                    },
                )
            return root.span

    def place(self, run: Run | None, context: Context | None = None) -> Context:
        """Give the context for what begins in a run: the current one if it is inside the run's span, else the span's.

        A context may be inside through a `with agent(...)` of the user's, and outside where it was not handed on.
        """
        context = settled(context)
        inside = current_span(context)
        if inside is not None and names.FRAMEWORK not in inside.attributes and _began_in_chain(inside, run):
            return context
        home = self.home(run)
        if home is None:
            return context
        while inside is not None and inside is not home:
            inside = inside.parent
        return context if inside is home else home.context_in(context)


def _began_in_chain(span: OpenSpan, run: Run | None) -> bool:
    """Whether a `with agent(...)` of the user's was begun in a plain chain, whose own span is not entered."""
    while run is not None:
        if run.span is not None:
            above = run.span if run.span.operation == names.INVOKE_WORKFLOW else None
            if above is None:
                return False
            while above is not None and above is not span:
                above = above.parent
            return above is None
        if run.parent is None:
            return run.kind == "chain" and span is not current_span(settled(run.context))
        run = run.parent
    return False


def _is_of_loop(node: str, run: Run, graph: Run | None) -> bool:
    """Whether a node is a part of an agent's loop rather than an agent: `create_agent` and `create_react_agent`."""
    if node.endswith(_MIDDLEWARE) or node == "tools":
        return True
    if node not in _LOOP:
        return False
    return _made_by_langchain(run) or graph is None or graph.name != UNNAMED or graph.agent is not None


def _made_by_langchain(run: Run) -> bool:
    return run.metadata.get("ls_integration") == "langchain_create_agent"
