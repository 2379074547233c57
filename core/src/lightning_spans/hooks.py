"""Every hook, in the order in which an attempt meets them.

Three kinds, never mixed: *first answer* (``firstresult``; return None unless the thing is yours), *notification* (all
are called, each guarded separately), *registration* (``register(name, thing)``; registering a name twice is an error).
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from lightning_spans.errors import AttachError

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Attempt
    from lightning_spans.schema.rewards import Reward
    from lightning_spans.schema.spans import Json, Span, Status
    from lightning_spans.schema.transitions import Transition

PROJECT = "lightning_spans"
TRAINER = "trainer"  # the plugin of lightning-trainer: it has no framework to attach
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as one that answers the hook of its name."""


class Caller(Protocol):
    """The caller of a model: a span, or what is known before there is one."""

    @property
    def agent(self) -> str | None:
        """The active agent; None if no agent is named."""

    @property
    def path(self) -> str | None:
        """Path of that agent, outermost first: ``billing/extract``; None if no agent is named."""

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that it belongs to; None outside attempts."""


class OpenSpan(Protocol):
    """An open span, as a plugin sees it. Call `end` once; later calls change nothing.

    Attributes:
        operation: ``chat``, ``execute_tool``, ``invoke_agent``, ...
        name: shown in viewers.
        agent: the active agent; None if no agent is named.
        attributes: JSON-like values by attribute name, without None values.
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        start_ns: Unix time in nanoseconds.
        end_ns: Unix time in nanoseconds; None while the span is open.
        status: ``ok`` or ``error`` once the span has ended.
        status_message: the error's text; empty if there is none.
    """

    operation: str
    name: str
    agent: str | None
    attributes: dict[str, Json]
    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int | None
    status: Status
    status_message: str

    @property
    def path(self) -> str | None:
        """Path of its agent, outermost first: ``billing/extract``; None if no agent is named."""

    @property
    def parent(self) -> OpenSpan | None:
        """The parent span; None for a root."""

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that it belongs to; None outside attempts."""

    @property
    def context(self) -> Context:
        """The context in which this span and its agent are current; enter it around everything below the span."""
        ...

    @property
    def traceparent(self) -> str:
        """The W3C header that makes a server's spans and calls children of this one."""
        ...

    def context_in(self, context: Context) -> Context:
        """Return this context with the span and its agent as the current ones; others' values in it are kept."""
        ...

    def set(self, **attributes: Json) -> None:
        """Add attributes; None values are omitted."""
        ...

    def end(
        self,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Json] | None = None,
        end_ns: int | None = None,
        later: Callable[[], None] | None = None,
    ) -> None:
        """End the span and deliver it.

        Args:
            error: the error; None if there was none.
            attributes: added before delivery.
            end_ns: Unix time in nanoseconds; default: now.
            later: called once the span has ended, to `set` more; if it raises, the error is logged and no span is lost.
        """


class Recorder(Protocol):
    """Starts spans, as a plugin sees it. One recorder serves every framework that is attached in a process."""

    @property
    def store(self) -> str | None:
        """Destination of spans outside attempts: the URL of a server or of a store."""
        ...

    def start(
        self,
        operation: str,
        name: str,
        *,
        agent: str | None = ...,
        parent: OpenSpan | None = None,
        context: Context | None = None,
        attributes: Mapping[str, Json] | None = None,
        start_ns: int | None = None,
    ) -> OpenSpan:
        """Start a span.

        Args:
            operation: ``chat``, ``execute_tool``, ``invoke_agent``, ...
            name: shown in viewers.
            agent: the active agent; default: the agent of `parent`, otherwise of the context. None: no agent is known.
            parent: the parent span; default: the open one in the context.
            context: where to look for parent, agent and attempt; default: the current context.
            attributes: None values are omitted.
            start_ns: Unix time in nanoseconds; default: now.

        Returns:
            The open span. Its `context` has no effect until entered.
        """
        ...

    def guard(self, plugin: str, span: OpenSpan | None = None) -> AbstractContextManager[None]:
        """Log errors inside the block instead of raising them into the agent."""
        ...

    def reroutes(self, span: Caller) -> bool:
        """Whether a model call goes to the policy: its attempt selects its agent, and `attach(agents=)` allows it."""
        ...


@hookspec(firstresult=True)
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """First answer: bind a framework's events to the recorder, once per live `attach()`, in the agent's process.

    Args:
        framework: the name given to `attach()`; return None unless it is yours.
        recorder: starts and ends spans.

    Returns:
        A callable that undoes everything done here.
    """


@hookspec(firstresult=True)
def lightning_agent_name(span: OpenSpan) -> str | None:
    """First answer: name the agent of a span that has ended, in the agent's process; the name is stored on the span.

    Called only for spans without an agent, before they are delivered, in a separate thread: what was current when the
    span began is in `span.context`. An answer that takes longer than 5 s is not awaited; until it comes, spans go
    without a name.
    """


@hookspec
def lightning_span_ended(span: Span) -> None:
    """Notification: a span ended and was handed to the sink. In the agent's process, in a separate thread.

    Spans come one at a time, in the order in which they ended. A slow or hanging listener delays neither the agent nor
    the delivery of spans: up to 16,384 spans wait for it, and it misses any more. If one raises, the error is logged
    and the others are still called. `Attachment.flush` waits for listeners, `detach` for at most 2 s.
    """


@hookspec(firstresult=True)
def lightning_adapt(trace: Trace) -> list[Transition] | None:
    """First answer: turn one finished attempt into transitions, on the training side. The core's answer comes last."""


@hookspec
def lightning_rewards(trace: Trace, transitions: Sequence[Transition]) -> list[Reward] | None:
    """Notification: an attempt was adapted; return automatic intermediate rewards for it. All answers are added up."""


@hookspec
def lightning_register_credit(register: Callable[[str, Any], None]) -> None:
    """Registration: credit assigners, callables as in `lightning_trainer.rl.credit.assigners`."""


@hookspec
def lightning_register_algorithms(register: Callable[[str, Any], None]) -> None:
    """Registration: algorithms of `lightning_trainer`."""


@hookspec
def lightning_register_backends(register: Callable[[str, Any], None]) -> None:
    """Registration: backends of `lightning_trainer`."""


@hookspec
def lightning_register_formats(register: Callable[[str, Any], None]) -> None:
    """Registration: formats of tool calls, each a `lightning_trainer.gateway.formats.table.Format`."""


@hookspec
def lightning_register_environments(register: Callable[[str, Any], None]) -> None:
    """Registration: kinds of environments, modules as `lightning_trainer.environments.EnvironmentKind`."""


@hookspec
def lightning_register_commands(register: Callable[[str, Any], None]) -> None:
    """Registration: commands of ``lightning-rl``.

    Each is a `click.Command` or a `lightning_trainer.commands.ListedCommand`.
    """


@hookspec
def lightning_register_engines(register: Callable[[str, Any], None]) -> None:
    """Registration: engines that sample for a backend, as in `lightning_trainer.engines.contract`."""


@hookspec
def lightning_register_alarms(register: Callable[[str, Any], None]) -> None:
    """Registration: alarms of a run, callables as in `lightning_trainer.report.alarms`."""


@hookspec
def lightning_register_judges(register: Callable[[str, Any], None]) -> None:
    """Registration: judges that compare the rollouts of a group, each a `lightning_trainer.judges.JudgeKind`."""


@hookspec
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Registration: callbacks for the steps of a run, as in `lightning_trainer.callbacks.CallbackKind`."""


class _CoreAdapter:
    """Adapts every trace that no plugin claimed."""

    @hookimpl(trylast=True)
    def lightning_adapt(self, trace: Trace) -> list[Transition]:
        from lightning_spans.adapter.adapt import adapt

        return adapt(trace)


logger = logging.getLogger("lightning_spans")
_lock = threading.RLock()


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the process's plugin manager, with the core's own plugins registered."""
    plugin_manager = pluggy.PluginManager(PROJECT)
    plugin_manager.add_hookspecs(sys.modules[__name__])
    plugin_manager.register(_CoreAdapter(), "core-adapter")
    return plugin_manager


def installed() -> dict[str, EntryPoint]:
    """Return the installed plugins by name, without importing them."""
    return {entry.name: entry for entry in entry_points(group=PROJECT)}


def load(name: str) -> None:
    """Import and register one plugin, once.

    Raises:
        AttachError: it is not installed or installed twice, cannot be imported, or has a hook that does not exist.
    """
    with _lock:
        if manager().has_plugin(name):
            return
        entries = entry_points(group=PROJECT, name=name)
        if not entries:
            known = ", ".join(sorted(installed().keys() - {TRAINER})) or "none"
            raise AttachError(f"no plugin {name!r}: is lightning-{name} installed? Plugins installed: {known}.")
        packages = sorted({entry.dist.name for entry in entries if entry.dist is not None})
        if len(packages) > 1:
            raise AttachError(f"plugin {name!r} is in two packages: {' and '.join(packages)}. Uninstall one of them.")
        try:
            module = next(iter(entries)).load()
        except ImportError as error:
            raise AttachError(f"plugin {name!r} does not import: {error}. Is {name} itself installed?") from error
        except Exception as error:
            of = f" of {packages[0]}" if packages else ""
            raise AttachError(f"plugin {name!r}{of} raises {type(error).__name__} on import: {error}") from error
        register(module, name)


def register(plugin: object, name: str) -> None:
    """Register a plugin object under a name, and check that all its hooks exist.

    Raises:
        AttachError: the name is taken, or a hook is misspelt.
    """
    with _lock:
        try:
            manager().register(plugin, name)
            manager().check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:
            if manager().get_plugin(name) is plugin:
                manager().unregister(plugin)
            raise AttachError(f"plugin {name!r}: {error}") from error


def unregister(name: str) -> None:
    """Unregister a plugin, if it is registered."""
    with _lock:
        plugin = manager().get_plugin(name)
        if plugin is not None:
            manager().unregister(plugin)


left_out: dict[str, str] = {}
"""By name of the plugin, why it could not be loaded or could not register what it has."""


def leave_out(name: str, reason: str) -> None:
    """Log once that a plugin is left out."""
    if name not in left_out:
        logger.warning("lightning: plugin %s is left out: %s", name, reason)
        logger.debug("lightning: plugin %s", name, exc_info=True)
    left_out[name] = reason


def load_all() -> list[str]:
    """Import and register every installed plugin, as the training side does; one that fails is logged and skipped.

    Returns:
        The names of the plugins that could not be loaded; `left_out` has the reasons.
    """
    failed = []
    for name in installed():
        try:
            load(name)
        except AttachError as error:
            leave_out(name, str(error))
            failed.append(name)
    return failed


def listens(hook: str) -> str:
    """Return the names of the plugins that implement a hook, as text; empty if there are none."""
    implementations = getattr(manager().hook, hook).get_hookimpls()
    return ", ".join(known.plugin_name for known in implementations) if implementations else ""


def notify(hook: str, **arguments: Any) -> list[Any]:
    """Call every implementation of a hook, each guarded separately, and return the answers that are not None.

    One listener that raises does not stop the others (plain pluggy calls stop at the first).
    """
    caller = getattr(manager().hook, hook)
    answers = []
    for implementation in reversed(caller.get_hookimpls()):
        given = {name: arguments[name] for name in implementation.argnames}
        try:
            answer = implementation.function(**given)
        except (Exception, SystemExit):
            logger.exception("lightning: %s of plugin %s failed", hook, implementation.plugin_name)
        else:
            if answer is not None:
                answers.append(answer)
    return answers
