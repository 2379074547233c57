"""`attach()`: the one line added to an agent's program."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lightning_spans.errors import AttachError
from lightning_spans.record.context import from_environment
from lightning_spans.record.pipeline import Pipeline, live_pipeline, set_live
from lightning_spans.record.prompts import read_prompts, use
from lightning_spans.schema.attempts import Attempt

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from lightning_spans.hooks import Recorder
    from lightning_spans.record.delivery.collector import Collector
    from lightning_spans.record.delivery.deliver import Destination
    from lightning_spans.record.delivery.outbox import Spool
    from lightning_spans.store import Store

logger = logging.getLogger("lightning_spans")
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `attach()`. Frameworks attached at the same time share a recorder, so these must be equal.

    Attributes:
        agents: names or globs that rerouting is limited to; None: all agents that the runner selects.
        store: URL or path of the store for spans outside a runner's attempts.
        tracer: ``otel`` or ``embedded``.
        otlp: an OTLP/HTTP endpoint that also gets every span; None: none.
        span_processors: OpenTelemetry SDK processors, which also get every span.
        prompts: path of a file with replacement system prompts.
    """

    agents: tuple[str, ...] | None
    store: str
    tracer: str
    otlp: str | None
    span_processors: tuple[SpanProcessor, ...] = ()
    prompts: str | None = None

    def __repr__(self) -> str:
        from lightning_spans.store.urls import without_secrets

        values = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return without_secrets(f"Options({', '.join(values)})")


_options: Options | None = None  # of the live attachments
_attached: dict[str, Attachment] = {}


class Attachment:
    """A live attachment. `detach()`, or leaving its ``with`` block, restores everything that `attach()` changed.

    Attributes:
        framework: the name given to `attach()`.
    """

    def __init__(self, framework: str, undo: Callable[[], None]) -> None:
        self.framework = framework
        self._undo = undo

    @property
    def live(self) -> bool:
        """Whether it is still recording."""
        return _attached.get(self.framework) is self

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until every span so far is delivered, spooled or dropped, and listeners have received it.

        Returns False if the time ran out.
        """
        pipeline = live_pipeline()
        if pipeline is None:
            return True
        until = time.monotonic() + timeout_s
        delivered = pipeline.recorder.tracer.flush(timeout_s)
        return pipeline.listeners.flush(max(0.0, until - time.monotonic())) and delivered

    def detach(self) -> None:
        """Stop recording and restore what was changed; the second call changes nothing.

        Delivers what was recorded first, but waits at most two seconds (`sinks.DETACH_S`) for a destination or a
        listener that does not answer. The rest is spooled, and the log reports how much was spooled or lost. Nothing
        is raised.
        """
        with _lock:
            if not self.live:
                return
            del _attached[self.framework]
            try:
                self._undo()
            except Exception:
                logger.exception("lightning: some changes of attaching %s could not be undone", self.framework)
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
    span_processors: Sequence[SpanProcessor] = (),
    prompts: str | Path | None = None,
) -> Attachment:
    """Record every model call, tool call and agent of a framework in this process.

    Without options it reads the environment that the runner sets; without a runner it writes to ``./lightning.db``.
    Attaching the same framework again returns the live attachment.

    Args:
        framework: the plugin's name: ``langchain``, ``openai``, ...
        agents: names or globs: only these may be rerouted to the policy in training; None: all that the runner
            selects. All agents are recorded in either case.
        store: URL or path for spans outside a runner's attempts; by default ``LIGHTNING_STORE``, else ``lightning.db``.
            A path is relative to the folder in which the program attaches, even if it changes folders later. For a
            server's URL, ``LIGHTNING_KEY`` is its key; a live key is enough. docs/how-to/live.md describes how such
            spans are labelled, sampled and masked.
        tracer: ``otel`` creates spans of OpenTelemetry's SDK if a processor or a collector receives them, ``embedded``
            creates the same records without the SDK. The store's records are the same in both cases.
        otlp: an OTLP/HTTP endpoint that also gets every span, such as ``http://localhost:6006/v1/traces``; by default
            ``LIGHTNING_OTLP``. The SDK's own exporter sends to it and reads its variables, such as
            ``OTEL_EXPORTER_OTLP_HEADERS``.
        span_processors: of OpenTelemetry's SDK; they get every span, and are shut down with the last `detach()`. Your
            own global provider is not changed. With ``OTEL_SDK_DISABLED=true`` neither they nor `otlp` get any spans.
        prompts: file that ``lightning-rl prompts`` wrote: its prompts replace the agents' own, in calls that are made
            with the openai client. None by default.

    Returns:
        The attachment: a context manager with `detach()`.

    Raises:
        AttachError: the plugin or its framework is not installed, or a live attachment has other options.
        ConfigError: an option, or a variable of docs/how-to/live.md, has an unknown value.
    """
    options = Options(
        agents=None if agents is None else (agents,) if isinstance(agents, str) else tuple(agents),
        store=_absolute(store) if store else os.environ.get("LIGHTNING_STORE") or "lightning.db",
        tracer=tracer,
        otlp=otlp or os.environ.get("LIGHTNING_OTLP") or None,
        span_processors=tuple(span_processors),
        prompts=None if prompts is None else str(prompts),
    )
    with _lock:
        if _options is not None and _options != options:
            live = ", ".join(_attached)
            raise AttachError(f"{live} is attached with {_options}, not {options}. Detach it first.")
        if framework in _attached:
            return _attached[framework]
        other = read_prompts(options.prompts) if options.prompts is not None else {}
        undo = _bind_or_close(framework, _open_pipeline(options).recorder)
        use(other)
        _attached[framework] = Attachment(framework, undo)
        return _attached[framework]


def _bind_or_close(framework: str, recorder: Recorder) -> Callable[[], None]:
    """Bind a framework. If that fails and nothing else is attached, close the pipeline that was opened for it."""
    try:
        return _bind(framework, recorder)
    except BaseException:
        if not _attached:
            _close_pipeline()
        raise


def _bind(framework: str, recorder: Recorder) -> Callable[[], None]:
    from lightning_spans import hooks

    hooks.load(framework)
    try:
        undo: Callable[[], None] | None = hooks.manager().hook.lightning_attach(framework=framework, recorder=recorder)
    except ImportError as error:
        raise AttachError(f"{framework!r} can't be attached: {error}. Is {framework} itself installed?") from error
    if undo is None:
        raise AttachError(f"no plugin attaches {framework!r}: its plugin has no lightning_attach for that name.")
    return undo


def attached_frameworks() -> list[str]:
    """Name the frameworks that are currently attached."""
    return list(_attached)


def _absolute(store: str) -> str:
    from lightning_spans.store.urls import absolute

    return absolute(store)


def _open_pipeline(told: Options) -> Pipeline:
    global _options  # noqa: PLW0603 - patches of a framework are process-wide, so what they report to is too
    live = live_pipeline()
    if live is not None:
        return live
    from lightning_spans.record.delivery.deliver import Delivery
    from lightning_spans.record.delivery.outbox import Spool, default_spool
    from lightning_spans.record.delivery.sink import BatchSink
    from lightning_spans.record.instrument.patches import Undo
    from lightning_spans.record.instrument.processes import carry_attempts
    from lightning_spans.record.instrument.threads import carry_context
    from lightning_spans.record.production import Live, read_live
    from lightning_spans.record.recorder import SpanRecorder
    from lightning_spans.record.tracing.listeners import Listeners, Naming
    from lightning_spans.record.tracing.tracers import check_tracer, make_tracer

    options = replace(told, store=_absolute(told.store))
    check_tracer(options.tracer, options.span_processors)
    _load_store(options)
    production = read_live()
    delivery = Delivery(lambda: _open_store(options.store), collector=options.otlp)
    own, spool = _own(options.store), Spool(default_spool())
    keeps = production.keeps if production.rate < 1 else None
    prepare = production.prepare if production != Live() else None
    sink = BatchSink(
        delivery,
        route=_route(options, own),
        own=own,
        spool=spool,
        keeps=keeps,
        prepare=prepare,
        finish=delivery.close,
    )
    delivery.reports = sink.reports
    processors, collector = _seen_by(options, spool)
    tracer = make_tracer(options.tracer, sink, processors, collector=collector, keeps=keeps, prepare=prepare)
    listeners, naming = Listeners(), Naming()
    recorder = SpanRecorder(
        tracer, on_end=listeners.tell, name_agent=naming, agents=options.agents, store=options.store
    )
    carried = Undo()
    carried.add(carry_context())
    carried.add(carry_attempts())
    pipeline = Pipeline(recorder, delivery, listeners, naming, carried)
    _options = told  # without a named store, an attachment in another folder is compatible
    set_live(pipeline)
    return pipeline


def _seen_by(options: Options, spool: Spool) -> tuple[Sequence[SpanProcessor], Collector | None]:
    """Return the SDK processors that get the spans: the user's, and the exporter to the user's collector."""
    from lightning_spans.record.tracing.tracers import is_sdk_disabled

    if options.tracer != "otel" or not (options.otlp or options.span_processors):
        return options.span_processors, None
    if is_sdk_disabled():
        logger.warning("lightning: OTEL_SDK_DISABLED is set: no span processor and no collector gets spans")
        return (), None
    if options.otlp is None:
        return options.span_processors, None
    from lightning_spans.record.delivery.collector import Collector

    return options.span_processors, Collector(options.otlp, spool)


def _close_pipeline() -> None:
    global _options
    from lightning_spans.record import unrecorded
    from lightning_spans.record.delivery import sink as sinks

    unrecorded.warn()
    unrecorded.forget()
    pipeline, _options = live_pipeline(), None
    set_live(None)
    use({})
    if pipeline is not None:
        pipeline.close(sinks.DETACH_S)


def _load_store(options: Options) -> None:
    """Import now what writes to the process's own store.

    Imported during the agent's first runs, half a second of CPU would slow all of them. Not in a runner's worker or an
    attempt, nor with a server as the store: spans go elsewhere there.
    """
    attempt = from_environment()
    elsewhere = os.environ.get("LIGHTNING_WORKER") or (attempt is not None and attempt.endpoint)
    if not elsewhere and not options.store.startswith(("http://", "https://")):
        import lightning_spans.store.sql.store  # noqa: F401 - for what it imports


def _open_store(url: str) -> Store:
    from lightning_spans.store import open_store

    return open_store(url)


def _own(store: str) -> Destination:
    """Return the process's own store as a destination. A server takes spans as OTLP, for which a live key is enough."""
    from lightning_spans.record.delivery.deliver import Destination, own_store
    from lightning_spans.store.keys import read_bearer

    if store.startswith(("http://", "https://")):
        key = read_bearer(os.environ.get("LIGHTNING_KEY"), "LIGHTNING_KEY")
        return Destination(f"{store.rstrip('/')}/v1/traces", key, own=True)
    return Destination(own_store(store), own=True)


def _route(options: Options, own: Destination) -> Callable[[Attempt | None], list[Destination]]:
    from lightning_spans.record.delivery.deliver import Destination

    extra = [Destination(options.otlp)] if options.otlp and options.tracer == "embedded" else []

    def route(attempt: Attempt | None) -> list[Destination]:
        if attempt is not None and attempt.endpoint:
            return [Destination(f"{attempt.endpoint}/v1/traces", attempt.key), *extra]
        return [own, *extra]

    return route
