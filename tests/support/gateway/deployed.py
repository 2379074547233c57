"""A gateway that follows its table of deployments when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from lightning_trainer.kits.deploy.routing import CONVERSATION_HEADER, Copier, DeploymentRouter
from lightning_trainer.kits.deploy.serving import AdapterLoader, DeploymentTableReader
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Note, roll_back
from support.fakes import FakeEngine, Served, served

NOTE = Note("because", "ada", at_ns=1)
CONVERSATION = CONVERSATION_HEADER.decode()


@dataclass
class Deployed:
    """A gateway that follows its table when a test says so."""

    server: Served
    table: DeploymentTableReader
    loader: AdapterLoader
    key: str

    def follow(self) -> None:
        self.table.read()
        self.loader.load(self.table.histories)

    def change(self, transition: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Make a transition of the agent writer, and follow it."""
        history = read_histories(self.server.store).get("writer", [])
        given = history if transition is roll_back else history[-1] if history else None
        keep(self.server.store, transition(given, "writer", *arguments, NOTE, **options))
        self.follow()

    def client(self, conversation: str = "", agent: str | None = "writer", key: str | None = None) -> openai.OpenAI:
        headers = {CONVERSATION: conversation} if conversation else {}
        headers |= {"x-lightning-agent": agent} if agent else {}
        url = f"{self.server.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key or self.key, default_headers=headers, max_retries=0)

    def say(self, conversation: str = "", text: str = "hi", **options: Any) -> str | None:
        messages: Any = [{"role": "user", "content": text}]
        reply = self.client(conversation, **options).chat.completions.create(model="old", messages=messages)
        return reply.choices[0].message.content

    def all_say(self, conversations: list[str]) -> list[str | None]:
        return [self.say(one) for one in conversations]


@contextmanager
def deployed(folder: Path, *, copies: Callable[[Any], Copier] | None = None, **options: Any) -> Iterator[Deployed]:
    engines = [FakeEngine(lambda _: "old", model="old"), FakeEngine(lambda _: "new", model="new")]
    options = {"engine": engines, **options}
    folder.mkdir(exist_ok=True)
    with served(folder, **options) as server:
        router = DeploymentRouter(server.store, copies(server.app) if copies else None)
        server.app.state.gateway.register(router)
        table, loader = DeploymentTableReader(server.store, router), AdapterLoader(server.app.state.models, kept=1)
        yield Deployed(server, table, loader, server.keys.issue("caller", holder="app"))
