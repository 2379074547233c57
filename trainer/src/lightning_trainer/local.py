"""The training side on one machine: a store, a server in front of it, and a runner that claims over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_spans.errors import ConfigError
from lightning_spans.store import Rollout, Store, open_store
from lightning_trainer.rollouts import Outcome, outcomes, wait
from lightning_trainer.runner import Runner

if TYPE_CHECKING:
    from lightning_trainer.engine import Engine
    from lightning_trainer.progress import Progress
    from lightning_trainer.server.settings import Routing


@dataclass(frozen=True, slots=True)
class Local:
    """A running server and the runner at work on it.

    Attributes:
        store: the server's own, to queue and read directly.
        runner: claims and ends rollouts with a key that can do no more.
        url: of the server, without ``/v1``.
    """

    store: Store
    runner: Runner
    url: str

    def run(
        self, rollouts: Sequence[Rollout], progress: Progress, what: str, *, check: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """Queue rollouts, wait until all have ended, and say what became of them.

        Args:
            rollouts: of a batch.
            progress: told how many have ended.
            what: what it calls this.
            check: called between looks; raises to give up.

        Raises:
            LightningError: see `rollouts.wait`; what has not ended is cancelled.
        """

        def both() -> None:
            check()
            self.runner.check()

        self.store.enqueue(rollouts)
        self.runner.wake()
        try:
            wait(
                self.store,
                rollouts,
                check=both,
                describe=self.runner.describe,
                on_progress=lambda done: progress.phase(what, done, len(rollouts)),
            )
        except BaseException:
            self.store.cancel([rollout.rollout_id for rollout in rollouts])
            raise
        return outcomes(self.store, rollouts)


@contextmanager
def serving(
    store: Store, runner: Runner, *, routing: Routing, engine: Engine | Sequence[Engine] | None = None, port: int = 0
) -> Iterator[Local]:
    """Serve the store on 127.0.0.1 and let a runner that has started claim from it, until the block ends.

    Args:
        store: closed by the caller.
        runner: stopped by the caller, after the block.
        routing: what attempts are told.
        engine: answers model calls, or several that do, each for its policy; None: there is no gateway.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use.
    """
    from lightning_spans.store_http import HttpStore
    from lightning_trainer.server.app import create_app
    from lightning_trainer.server.keys import Keys
    from lightning_trainer.server.serving import ServerThread

    keys = Keys.fresh()
    server = ServerThread(create_app(store, keys=keys, engine=engine, routing=routing), port=port)
    url = server.start()
    claims = HttpStore(url, key=keys.issue("runner"))
    try:
        runner.serve(claims)
        yield Local(store, runner, url)
    finally:
        runner.stop()
        claims.close()
        server.stop()


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """Open a store of this machine's, and close it after the block.

    Raises:
        ConfigError: it is another server's: that one has its own gateway and queue.
    """
    if url.startswith(("http://", "https://")):
        raise ConfigError(f"store {url}: give a database (a path, sqlite:/// or postgresql://), not a server.")
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def routing_of(**values: Any) -> Routing:
    """Make a routing; imported late, because the server's packages are heavy."""
    from lightning_trainer.server.settings import Routing

    return Routing(**values)
