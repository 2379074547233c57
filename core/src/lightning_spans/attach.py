"""`attach()`: the one line added to an agent's program."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from lightning_spans.context import Attempt
from lightning_spans.errors import AttachError

if TYPE_CHECKING:
    from lightning_spans.delivery import Delivery, Destination
    from lightning_spans.listeners import Listeners, Naming
    from lightning_spans.recorder import Recorder
    from lightning_spans.store import Store

logger = logging.getLogger("lightning_spans")
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Options:
    """What `attach()` was told; frameworks attached at once share a recorder, so they must agree.

    Attributes:
        agents: names or globs that rerouting is limited to; None: whatever the runner asks for.
        store: URL or path of the store for spans outside a runner's attempts.
        tracer: ``otel`` or ``embedded``.
        otlp: an OTLP/HTTP endpoint that gets every span too; None: none.
    """

    agents: tuple[str, ...] | None
    store: str
    tracer: str
    otlp: str | None


@dataclass(slots=True)
class _Pipeline:
    options: Options
    recorder: Recorder
    delivery: Delivery
    listeners: Listeners
    naming: Naming
    undo_threading: Callable[[], None]

    def close(self) -> None:
        from lightning_spans import sinks

        self.undo_threading()
        self.recorder.tracer.close(sinks.DETACH_S)
        self.naming.close()
        self.listeners.close()


_pipeline: _Pipeline | None = None
_attached: dict[str, Attachment] = {}


class Attachment:
    """A live attachment. `detach()`, or leaving its ``with`` block, restores everything that `attach()` changed."""

    def __init__(self, framework: str, undo: Callable[[], None]) -> None:
        self.framework = framework
        self._undo = undo

    @property
    def live(self) -> bool:
        """Whether it still records."""
        return _attached.get(self.framework) is self

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until every span so far is delivered, spooled or dropped, and listeners were told of it.

        Gives False when the time ran out.
        """
        pipeline = _pipeline
        if pipeline is None:
            return True
        until = time.monotonic() + timeout_s
        delivered = pipeline.recorder.tracer.flush(timeout_s)
        return pipeline.listeners.flush(max(0.0, until - time.monotonic())) and delivered

    def detach(self) -> None:
        """Stop recording and restore what was changed; the second call changes nothing.

        What was recorded is delivered first, but a destination that does not answer is waited for at most two seconds
        (`sinks.DETACH_S`). What it has not taken by then is spooled; how much that is, and what was lost, is logged.
        A listener that does not come back is waited for as long. Nothing is raised.
        """
        with _lock:
            if not self.live:
                return
            del _attached[self.framework]
            try:
                self._undo()
            except Exception:
                logger.exception("lightning: not all that attaching %s changed could be restored", self.framework)
            if not _attached:
                _close_pipeline()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()


def attach(
    framework: str,
    *,
    agents: Sequence[str] | None = None,
    store: str | None = None,
    tracer: str = "otel",
    otlp: str | None = None,
) -> Attachment:
    """Record every model call, tool call and agent of a framework in this process.

    With no options it reads the environment that the runner sets; without a runner it writes to ``./lightning.db``.
    Attaching the same framework twice is attaching it once: the live attachment is given back.

    Args:
        framework: the plugin's name: ``langchain``, ``openai``, ...
        agents: names or globs: only these may ever be rerouted to the policy in training; None: whatever the runner
            asks for. All agents are recorded either way.
        store: URL or path for spans outside a runner's attempts; by default ``LIGHTNING_STORE``, else ``lightning.db``.
            For a server's URL, ``LIGHTNING_KEY`` is its key; a live key is enough. Docs/live.md: how they are labelled,
            sampled and masked.
        tracer: ``otel`` for real OpenTelemetry spans, ``embedded`` for the same records without the SDK's pipeline.
        otlp: an OTLP/HTTP endpoint that gets every span too, such as ``http://localhost:6006/v1/traces``; by default
            ``LIGHTNING_OTLP``.

    Returns:
        The attachment: a context manager with `detach()`.

    Raises:
        AttachError: the plugin or its framework is not installed, or a live attachment has other options.
        ConfigError: the value of an option, or of a variable of docs/live.md, is not known.
    """
    options = Options(
        agents=None if agents is None else (agents,) if isinstance(agents, str) else tuple(agents),
        store=store or os.environ.get("LIGHTNING_STORE") or "lightning.db",
        tracer=tracer,
        otlp=otlp or os.environ.get("LIGHTNING_OTLP") or None,
    )
    with _lock:
        if _pipeline is not None and _pipeline.options != options:
            live = ", ".join(_attached)
            raise AttachError(f"{live} is attached with {_pipeline.options}, not {options}. Detach it first.")
        if framework in _attached:
            return _attached[framework]
        recorder = _open_pipeline(options).recorder
        try:
            undo = _bind(framework, recorder)
        except BaseException:
            if not _attached:
                _close_pipeline()
            raise
        _attached[framework] = Attachment(framework, undo)
        return _attached[framework]


def _bind(framework: str, recorder: Recorder) -> Callable[[], None]:
    from lightning_spans import plugins

    plugins.load(framework)
    try:
        undo: Callable[[], None] | None = plugins.manager().hook.lightning_attach(
            framework=framework, recorder=recorder
        )
    except ImportError as error:
        raise AttachError(f"{framework!r} can't be attached: {error}. Is {framework} itself installed?") from error
    if undo is None:
        raise AttachError(f"no plugin attaches {framework!r}: its plugin has no lightning_attach for that name.")
    return undo


def live_recorder() -> Recorder | None:
    """Give the recorder of this process while something is attached, else None."""
    return _pipeline.recorder if _pipeline is not None else None


def live_listeners() -> Listeners | None:
    """Give what tells listeners of this process's spans while something is attached, else None."""
    return _pipeline.listeners if _pipeline is not None else None


def live_delivery() -> Delivery | None:
    """Give what writes to this process's own store while something is attached, else None."""
    return _pipeline.delivery if _pipeline is not None else None


def attached() -> list[str]:
    """Name the frameworks that are attached now."""
    return list(_attached)


def _open_pipeline(options: Options) -> _Pipeline:
    global _pipeline  # noqa: PLW0603 - patches of a framework are process-wide, so what they report to is too
    if _pipeline is not None:
        return _pipeline
    from lightning_spans.delivery import Delivery, own_store
    from lightning_spans.listeners import Listeners, Naming
    from lightning_spans.live import Live, read_live
    from lightning_spans.recorder import Recorder
    from lightning_spans.sinks import BatchSink, default_spool
    from lightning_spans.spool import Spool
    from lightning_spans.threads import carry_context
    from lightning_spans.tracers import make_tracer

    live = read_live()
    delivery = Delivery(lambda: _open_store(options.store))
    sink = BatchSink(
        delivery,
        route=_route(options),
        own=own_store(options.store),
        spool=Spool(default_spool()),
        keeps=live.keeps if live.rate < 1 else None,
        prepare=live.prepare if live != Live() else None,
        finish=delivery.close,
    )
    delivery.about = sink.about
    tracer = make_tracer(options.tracer, sink)
    listeners, naming = Listeners(), Naming()
    recorder = Recorder(tracer, on_end=listeners.tell, name_agent=naming, agents=options.agents, store=options.store)
    _pipeline = _Pipeline(options, recorder, delivery, listeners, naming, carry_context())
    return _pipeline


def _close_pipeline() -> None:
    global _pipeline
    pipeline, _pipeline = _pipeline, None
    if pipeline is not None:
        pipeline.close()


def _open_store(url: str) -> Store:
    from lightning_spans.store import open_store

    return open_store(url)


def _route(options: Options) -> Callable[[Attempt | None], list[Destination]]:
    from lightning_spans.delivery import Destination, own_store

    # A server takes them as OTLP, for which a live key is enough.
    own = Destination(own_store(options.store))
    if options.store.startswith(("http://", "https://")):
        own = Destination(f"{options.store.rstrip('/')}/v1/traces", os.environ.get("LIGHTNING_KEY"))
    extra = [Destination(options.otlp)] if options.otlp else []

    def route(attempt: Attempt | None) -> list[Destination]:
        if attempt is not None and attempt.endpoint:
            return [Destination(f"{attempt.endpoint}/v1/traces", attempt.key), *extra]
        return [own, *extra]

    return route
