"""LangChain's runs as a tree: which agent each run belongs to, and which runs become spans.

LangChain reports a run for every step, and most are internal. An agent is a named graph (`create_agent(name=)`,
`compile(name=)`) or a node of a graph, except for the internal nodes of an agent's loop (``model``, ``tools``). A run
is known to be a graph only when its first node starts, so its span is created then, with the run's start time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_langchain.libraries import AGENTS, LIBRARY, graph_below, packages_of
from lightning_langchain.tools import Conversation, WaitingRequests
from lightning_openai.json_text import to_json
from lightning_spans.record.context import current_agent, current_attempt, settle_context
from lightning_spans.record.instrument.scope import Scope
from lightning_spans.record.instrument.tracker import EventTracker, ends
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from uuid import UUID

    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.record.instrument.tool_requests import ToolRequest

UNNAMED: Final = "LangGraph"  # LangGraph's name for an unnamed graph
_LOOP: Final = frozenset(
    {"model", "agent", "tools", "pre_model_hook", "post_model_hook", "generate_structured_response"}
)
_MIDDLEWARE: Final = (".before_agent", ".before_model", ".after_model", ".after_agent")


class ChainRun(Scope):
    """One run of LangChain."""

    __slots__ = (
        "agent", "cached", "context", "foreign", "graph", "inner", "kind", "lc_agent", "made", "metadata", "model",
        "name", "namespace", "offered", "packages", "parent", "pregel", "refused", "requests", "start_ns", "tags",
        "unknown",
    )  # fmt: skip

    def __init__(self, parent: ChainRun | None, kind: str, name: str, metadata: Mapping[str, Any]) -> None:
        here = settle_context()
        super().__init__(here)
        self.parent = parent
        # Shared by the whole tree: its open runs, and the tool calls that models asked for and that have not run yet.
        self.inner: dict[UUID, ChainRun] = {} if parent is None else parent.inner
        self.requests: list[ToolRequest] = [] if parent is None else parent.requests
        # Shared by the whole tree, by id: calls of tools that the model was not offered and that are not answered yet.
        self.unknown: dict[str, ToolRequest] = {} if parent is None else parent.unknown
        self.offered: frozenset[str] = frozenset()  # of a chat run: names of the tools that its model was offered
        self.made: ToolRequest | None = None  # of a tool: the call that asked for it
        self.refused: ToolRequest | None = None  # of a tool that answers for an unknown one: that call
        self.kind = kind  # chain, tool or chat
        self.name = name
        self.metadata = metadata
        self.namespace: str | None = metadata.get("langgraph_checkpoint_ns")
        self.lc_agent: str | None = metadata.get("lc_agent_name")
        self.agent: str | None = None  # of a graph, a node or a tool: the agent it belongs to
        self.context: Context = here
        self.start_ns = time.time_ns()
        self.graph = False
        # Of a graph: the graph, its tags, the packages that its nodes come from, and whether it belongs to a library.
        self.pregel: Any = graph_below() if kind == "chain" else None
        self.tags: Sequence[str] = ()
        self.packages: frozenset[str] = frozenset()
        self.foreign = False
        self.model = ""  # of a chat run: the class of its model
        self.cached = False  # of a chat run: the answer came from a cache


class ChainRuns(EventTracker[ChainRun]):
    """The open runs, by LangChain's ids, and the spans of those that are agents or tools."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._waiting = WaitingRequests()
        self._lock = threading.RLock()  # parallel branches of a graph begin its span only once

    def begin_run(
        self, run_id: UUID, parent_id: UUID | None, kind: str, name: str, metadata: Mapping[str, Any]
    ) -> ChainRun:
        """Add a run that starts."""
        run = ChainRun(self.scopes.get(parent_id), kind, name, metadata)
        if run.parent is None:
            self._waiting.begin(run.requests, _conversation(run))
        self.scopes[run_id] = run
        run.inner[run_id] = run
        return run

    def end_run(self, run_id: UUID) -> ChainRun | None:
        """Remove a run that ends and leave its context. The caller still has to end its span."""
        run = self.leave(run_id)
        if run is None:
            return None
        run.inner.pop(run_id, None)
        if run.parent is None:
            for inner_id, inner in reversed(list(run.inner.items())):  # cancelled without an event
                self.end_run(inner_id)
                if inner.call is not None and self.live:
                    inner.call.end(error=asyncio.CancelledError())
                self.end(inner.span, error=asyncio.CancelledError() if inner.kind == "tool" else None)
            for request in list(run.unknown.values()):
                self.refuse(run, request, f"there is no tool {request.name!r}")
            self._waiting.end(run.requests, _conversation(run))
        return run

    @ends
    def fail_tool(self, tool: Scope | None, error: BaseException) -> None:
        """End a tool's run with an error that LangChain did not report. Changes nothing if the run has ended."""
        runs = tool.inner if isinstance(tool, ChainRun) and tool.kind == "tool" else {}
        for run_id, run in list(runs.items()):
            if run is tool:
                self.end_run(run_id)
                self.end(run.span, error=error)

    def refuse(self, run: ChainRun, request: ToolRequest, why: str) -> None:
        """Record a tool call for which no tool runs."""
        if request.call_id is not None:
            run.unknown.pop(request.call_id, None)
        if request in run.requests:
            run.requests.remove(request)
        text = request.arguments if isinstance(request.arguments, str) else to_json(request.arguments)
        context = self.place(run, run.context)
        self.end(self.begin_tool(request.name, request.call_id, text, context, agent=request.agent), error=why)

    def is_node(self, run: ChainRun) -> bool:
        """Whether a chain is a node of a graph, which has its own checkpoint namespace."""
        return run.namespace is not None and (run.parent is None or run.namespace != run.parent.namespace)

    def begin_node(self, run: ChainRun) -> None:
        """Find a node's agent, begin its span if the node is an agent itself, and enter it."""
        node = str(run.metadata.get("langgraph_node") or run.name)
        graph = run.parent
        with self._lock:
            if graph is not None and not graph.graph:
                self._begin_graph(graph)
        if _is_of_loop(node, run, graph):
            self._name_loop(run, graph)
        elif graph is not None and graph.foreign:
            run.agent = graph.agent
        else:
            self._begin_agent(run, node)
        run.enter(self.place(run))

    def _begin_graph(self, graph: ChainRun) -> None:
        graph.graph = True
        graph.name = getattr(graph.pregel, "name", None) or graph.name  # a `run_name` replaces only the reported one
        graph.agent = current_agent(self.place(graph.parent, graph.context))
        above = graph.parent.lc_agent if graph.parent is not None else None
        made = graph.lc_agent if graph.lc_agent and (graph.lc_agent != above or graph.name == above) else None
        own = made or graph.name
        graph.foreign = made is None and _is_foreign(graph)
        graph.pregel = None
        if own != UNNAMED and not graph.foreign:
            self._begin_agent(graph, own)

    def _name_loop(self, run: ChainRun, graph: ChainRun | None) -> None:
        """Find the agent whose loop contains a node.

        The named graph, otherwise the surrounding agent, otherwise the graph.
        """
        if graph is None:  # recording began within it
            if run.lc_agent:
                self._begin_agent(run, run.lc_agent)
            return
        if graph.agent is None and _made_by_langchain(run):
            with self._lock:
                if graph.agent is None:
                    self._begin_agent(graph, UNNAMED)
        run.agent = graph.agent

    def _begin_agent(self, run: ChainRun, name: str) -> None:
        """Begin an agent's span, unless the same agent already surrounds it (a node that contains a named graph)."""
        around = run.parent
        while around is not None and around.span is None:
            around = around.parent
        run.agent = name
        if around is not None and around.kind == "chain" and around.agent == name:
            return
        run.span = self._begin(names.INVOKE_AGENT, run, name, self.place(run.parent, run.context))

    def _begin(self, operation: str, run: ChainRun, name: str, context: Context) -> OpenSpan | None:
        return self.begin(
            operation,
            name,
            agent=name if operation == names.INVOKE_AGENT else None,
            context=context,
            attributes={names.CONVERSATION_ID: run.metadata.get("thread_id")},
            start_ns=run.start_ns,
        )

    def home(self, run: ChainRun | None) -> OpenSpan | None:
        """Return the parent span for what happens in a run; None if the run stands alone."""
        while run is not None:
            if run.span is not None:
                return run.span
            if run.parent is None and run.kind == "chain":
                return self._begin_workflow(run)
            run = run.parent
        return None

    def _begin_workflow(self, root: ChainRun) -> OpenSpan | None:
        with self._lock:
            if root.span is None:
                context = settle_context(root.context)
                if (around := current_span(context)) is not None:
                    return around
                root.span = self._begin(names.INVOKE_WORKFLOW, root, root.name, context)
            return root.span

    def place(self, run: ChainRun | None, context: Context | None = None) -> Context:
        """Return the context for what begins in a run: the current one if it is within the run's span, else the span's.

        A context may be within it through the user's `with agent(...)`, and outside it if it was not passed on.
        """
        context = settle_context(context)
        inside = current_span(context)
        if inside is not None and names.FRAMEWORK not in inside.attributes and _began_in_chain(inside, run):
            return context
        home = self.home(run)
        if home is None:
            return context
        while inside is not None and inside is not home:
            inside = inside.parent
        return context if inside is home else home.context_in(context)


def _conversation(root: ChainRun) -> Conversation | None:
    """Return the key of a run's conversation: its attempt and thread. Programs reuse a thread's id in each rollout."""
    thread = root.metadata.get("thread_id")
    if thread is None:
        return None
    attempt = current_attempt(root.context)
    return None if attempt is None else attempt.attempt_id, str(thread)


def _began_in_chain(span: OpenSpan, run: ChainRun | None) -> bool:
    """Whether the user's `with agent(...)` began in a plain chain, whose own span is not entered."""
    while run is not None:
        if run.span is not None:
            above = run.span if run.span.operation == names.INVOKE_WORKFLOW else None
            if above is None:
                return False
            while above is not None and above is not span:
                above = above.parent
            return above is None
        if run.parent is None:
            return run.kind == "chain" and span is not current_span(settle_context(run.context))
        run = run.parent
    return False


def _is_foreign(graph: ChainRun) -> bool:
    """Whether a graph belongs to a library and works for one of the user's agents, so that its nodes are not agents.

    Without a surrounding agent, only its nodes tell calls apart, so they count. A graph from the same package as the
    surrounding graph is treated like that graph, because a whole program may be installed as a package.
    """
    graph.packages = packages_of(graph.pregel) if graph.pregel is not None else frozenset()
    if graph.agent is None or AGENTS in graph.tags:
        return False
    if LIBRARY in graph.tags:
        return True
    around = graph.parent
    while around is not None and not around.graph:
        around = around.parent
    if around is not None and graph.packages & around.packages:
        return around.foreign
    return bool(graph.packages)


def _is_of_loop(node: str, run: ChainRun, graph: ChainRun | None) -> bool:
    """Whether a node is part of an agent's loop (`create_agent`, `create_react_agent`) rather than an agent."""
    if node.endswith(_MIDDLEWARE) or node == "tools":
        return True
    if node not in _LOOP:
        return False
    return _made_by_langchain(run) or graph is None or graph.name != UNNAMED or graph.agent is not None


def _made_by_langchain(run: ChainRun) -> bool:
    return run.metadata.get("ls_integration") == "langchain_create_agent"
