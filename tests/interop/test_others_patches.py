"""OpenInference's instrumentor of the openai client and ours together: whoever comes or goes first, both work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import openai
import pytest
from openai._base_client import AsyncAPIClient, SyncAPIClient

import lightning_openai
from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.suite import MODEL
from lightning_spans import open_store
from lightning_spans.schema import spans as names

if os.environ.get("INTEROP") != "1":
    pytest.importorskip("openinference.instrumentation.openai", exc_type=ImportError)

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
ORDERS = ["us them us them", "us them them us", "them us them us", "them us us them", "us them us us us them"]


class Both:
    """Comes and goes: `toggle` brings one of them in, or takes it out."""

    def __init__(self, folder: Any) -> None:
        from openinference.instrumentation.openai import OpenAIInstrumentor
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.store = str(folder / "own.db")
        self.exported = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exported))
        self.instrumentor = OpenAIInstrumentor()
        self.attachment: Any = None
        self.runner = asyncio.Runner()  # one loop, since connections belong to it

    def call(self, client: Any) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
        if isinstance(client, openai.AsyncOpenAI):
            answer = self.runner.run(awaited(answer))
        assert answer.choices[0].message.content.startswith("nobody answers")

    def toggle(self, who: str) -> None:
        if who == "them":
            if self.them:
                self.instrumentor.uninstrument()
            else:
                self.instrumentor.instrument(tracer_provider=self.provider, skip_dep_check=True)
        elif self.attachment is None:
            self.attachment = lightning_openai.attach(store=self.store)
        else:
            self.attachment.flush(60)
            self.attachment.detach()
            self.attachment = None

    @property
    def them(self) -> bool:
        return bool(self.instrumentor.is_instrumented_by_opentelemetry)

    def recorded(self) -> tuple[int, int]:
        """Count the model calls that we recorded, and those that they did."""
        if self.attachment is not None:
            self.attachment.flush(60)
        store = open_store(self.store)
        try:
            ours = [span for span in store.spans() if span.operation == names.CHAT]
        finally:
            store.close()
        return len(ours), len(self.exported.get_finished_spans())


async def awaited(answer: Any) -> Any:
    return await answer


def wrappers_of_ours(found: Any) -> int:
    """Count how many of ours a call passes."""
    count = 0
    while found is not None:
        count += type(found) is FunctionType and "lightning_openai" in found.__code__.co_filename
        found = getattr(found, "__wrapped__", None)
    return count


@pytest.fixture
def both(tmp_path: Any) -> Iterator[Both]:
    both = Both(tmp_path)
    yield both
    for who, there in (("us", both.attachment), ("them", both.them)):
        if there:
            both.toggle(who)
    both.runner.close()


@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI])
@pytest.mark.parametrize("order", ORDERS)
def test_whoever_comes_or_goes_first_each_call_is_recorded_once_by_each_who_is_there(order, kind, both):
    originals = [SyncAPIClient.request, AsyncAPIClient.request]
    expected_ours = expected_theirs = 0
    with ScriptedServer() as server:
        early = kind(base_url=server.url, max_retries=0)
        for who in order.split():
            both.toggle(who)
            for client in (early, kind(base_url=server.url, max_retries=0)):
                both.call(client)
                expected_ours += both.attachment is not None
                expected_theirs += both.them
                assert both.recorded() == (expected_ours, expected_theirs)
            assert wrappers_of_ours(kind.request) == (both.attachment is not None)
        headers = [("traceparent" in request.headers) for request in server.requests]
    assert sum(headers) == expected_ours
    assert not both.them
    assert both.attachment is None
    assert [SyncAPIClient.request, AsyncAPIClient.request] == originals
    for client_kind, original in ((openai.OpenAI, originals[0]), (openai.AsyncOpenAI, originals[1])):
        assert client_kind.request is original  # no wrapper is left, neither live nor dead
