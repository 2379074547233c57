"""Orchestrations and group chats: each is one trace, even if the runtime passes messages to agents in its own tasks."""

from __future__ import annotations

import re
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from semantic_kernel.agents import AgentGroupChat
from semantic_kernel.agents.orchestration.orchestration_base import OrchestrationBase, OrchestrationResult
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.agents.runtime.in_process import in_process_runtime as runtimes

from lightning_semantic_kernel import FRAMEWORK
from lightning_spans.record.context import overlaid, settle_context, use_context
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_SENDER: Final = "_lightning_sender"
_RANDOM: Final = re.compile(r"_[0-9a-f]{32}$")  # end of the name that Semantic Kernel generates for an unnamed agent


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Semantic Kernel to record every orchestration and message; what is yielded removes each patch."""
    orchestrations = KernelOrchestrations(recorder, FRAMEWORK)
    yield orchestrations.stop
    yield replace(OrchestrationBase, "invoke", orchestrations.wrap_invoke)
    yield replace(OrchestrationResult, "get", orchestrations.wrap_get)
    for name in ("invoke", "invoke_stream"):
        yield replace(AgentGroupChat, name, orchestrations.wrap_chat)
    yield replace(runtimes, "get_telemetry_envelope_metadata", orchestrations.wrap_metadata)
    for name in ("_process_send", "_process_publish"):
        yield replace(InProcessRuntime, name, orchestrations.wrap_process)


class KernelOrchestrations(Tracker):
    """Starts and ends spans around orchestrations, and passes their context along with messages."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._runs: dict[int, OpenSpan] = {}  # by the identity of their result

    def wrap_invoke(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the start of an orchestration. It returns at once; its result says when it has ended."""

        async def invoke(orchestration: Any, *args: Any, **kwargs: Any) -> Any:
            span = self.begin(names.INVOKE_WORKFLOW, _RANDOM.sub("", orchestration.name))
            with nullcontext() if span is None else self.start_inside(span):
                result = await original(orchestration, *args, **kwargs)
            if span is not None:
                self._runs[id(result)] = span
                weakref.finalize(result, self._finish, id(result))
            return result

        return invoke

    def wrap_get(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the wait for the result."""

        async def get(result: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await original(result, *args, **kwargs)
            finally:
                if result.event.is_set():  # or the program stops waiting while the orchestration continues
                    self._finish(id(result), result.exception)

        return get

    def _finish(self, run: int, error: BaseException | None = None) -> None:
        self.end(self._runs.pop(run, None), error=error)

    def wrap_chat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a group chat, message by message or part by part."""

        def invoke(chat: Any, *args: Any, **kwargs: Any) -> Any:
            return self._read(chat, original(chat, *args, **kwargs))

        return invoke

    async def _read(self, chat: Any, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        inner = self.steps(self.begin(names.INVOKE_WORKFLOW, type(chat).__name__), items)
        try:
            async for item in inner:
                yield item
        finally:
            await inner.aclose()

    def wrap_metadata(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the sending of a message: the runtime's tracing metadata also carries the sender's context."""

        def get_telemetry_envelope_metadata() -> Any:
            metadata = original()
            if self.live:
                with self.guard():
                    setattr(metadata, _SENDER, settle_context())
            return metadata

        return get_telemetry_envelope_metadata

    def wrap_process(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the delivery of a message to its handlers, in a task of whoever started the runtime."""

        async def process(runtime: Any, envelope: Any) -> Any:
            sender = getattr(envelope.metadata, _SENDER, None)
            with nullcontext() if sender is None or not self.live else use_context(overlaid(sender)):
                return await original(runtime, envelope)

        return process
