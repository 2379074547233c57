"""A server with its key files, its viewer and a candidate in a canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lightning_spans.store import open_store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.kits.deploy.serving import deploying
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.view.pages import add_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs
from support.cli import call
from support.fakes import FakeEngine

NAMED = ("candidate", "--model", "new", "--stable", "old", "--needs-approval")


class Site:
    """A server with its key files, as `lightning-rl server` makes them, and a candidate in a canary."""

    def __init__(self, folder: Path, url: str, keys: Keys) -> None:
        self.folder, self.url, self.keys = folder, url, keys
        self.file = folder / "server.db"

    def key(self, scope: Any, **options: Any) -> Path:
        path = self.folder / f"{scope}.key"
        path.write_text(self.issue(scope, **options))
        return path

    def issue(self, scope: Any, **options: Any) -> str:
        return self.keys.issue(scope, holder="ada" if scope in ("approver", "deployer") else scope, **options)

    def deploy(self, *arguments: str, key: str = "lightning.key", store: str | None = None) -> Any:
        return call(
            "deploy", *arguments, "--agent", "writer", "--store", store or self.url, "--key-file", self.folder / key
        )

    def approve(self, key: Path, *more: str) -> Any:
        return call("deploy", "approve", "writer", "--store", self.url, "--key-file", key, *more)

    def promote(self, **options: Any) -> Any:
        return self.deploy("promote", "--override", "--reason", "few outcomes", **options)

    def history(self) -> list[Deployment]:
        with closing(open_store(str(self.file))) as store:
            return read_histories(store)["writer"]

    def write(self, row: Deployment) -> None:
        with closing(open_store(str(self.file))) as store:
            keep(store, row)


@contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Start the server."""
    keys = Keys.from_file(folder / "lightning.key.secret")
    (folder / "lightning.key").write_text(keys.issue("admin"))
    store = open_store(str(folder / "server.db"))
    engines = [FakeEngine(lambda _: "old", model="old"), FakeEngine(lambda _: "new", model="new")]
    app = create_app(store, keys=keys, engine=engines)
    views = Views(Runs(store=str(folder / "server.db")))
    add_view(app, views)
    thread = ServerThread(app)
    try:
        with deploying(app):
            site = Site(folder, thread.start(), keys)
            for arguments in (NAMED, ("canary", "--share", "20%")):
                assert site.deploy(*arguments).exit_code == 0
            yield site
    finally:
        views.stopping.set()
        thread.stop()
        store.close()
