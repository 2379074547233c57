"""The training side on one machine: a store, a server in front of it, and a runner that claims over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import is_glob
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store, open_store
from lightning_trainer.choices import Timeouts
from lightning_trainer.naming import parse_rules
from lightning_trainer.policies import parse
from lightning_trainer.rl.rollouts import Outcome, outcomes, wait
from lightning_trainer.run.own_queue import own_queue
from lightning_trainer.runner.runner import Runner

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.gateway.app import App
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.gateway.engine import Engine
    from lightning_trainer.gateway.settings import Routing
    from lightning_trainer.gateway.upstream.upstream import Upstream
    from lightning_trainer.report.progress import Progress

LOOPBACK: Final = "127.0.0.1"
UNKNOWN_POLICY: Final = "policy"  # asked for by calls whose agent has none, where agents have their own: refused
UNNAMED: Final = "agent"  # name of the one agent of a command that names none


@dataclass(frozen=True, slots=True)
class Local:
    """A running server and the runner at work on it.

    Attributes:
        store: the server's own, to queue and read directly. What is queued in it here is what runners of this server
            get, whatever else waits in the same database.
        runner: claims and ends rollouts with a key that can do no more.
        url: of the server, without ``/v1``.
        timeouts: how rollouts that were too slow count.
    """

    store: Store
    runner: Runner
    url: str
    timeouts: Timeouts = "count"

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
        return outcomes(self.store, rollouts, self.timeouts)


@contextmanager
def serving(
    store: Store,
    runner: Runner,
    *,
    routing: Routing,
    engine: Engine | Sequence[Engine] | None = None,
    upstreams: Sequence[Upstream] = (),
    port: int = 0,
    host: str = LOOPBACK,
    keys: Keys | None = None,
    extend: Callable[[App], None] | None = None,
    timeouts: Timeouts = "count",
) -> Iterator[Local]:
    """Serve the store and let a runner that has started claim from it, until the block ends.

    Only what is queued in `Local.store`, or over the server's API, is claimed.

    Args:
        store: closed by the caller.
        runner: stopped by the caller, after the block.
        routing: what attempts are told.
        engine: answers model calls, or several that do, each for its policy; None: only upstreams do.
        upstreams: servers elsewhere that answer model calls.
        port: 0 takes a free one.
        host: address to listen on. On another than this machine's own nothing is encrypted.
        keys: of the server; None: new ones, which nobody else has.
        extend: adds routes to the server's app.
        timeouts: how rollouts that were too slow count.

    Raises:
        ConfigError: the port is in use.
    """
    from lightning_spans.store.http import HttpStore
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import RUN_S, Keys
    from lightning_trainer.gateway.http.serving import ServerThread

    keys, store = keys or Keys.fresh(), own_queue(store)
    app = create_app(store, keys=keys, engine=engine, upstreams=upstreams, routing=routing)
    if extend is not None:
        extend(app)
    server = ServerThread(app, host=host, port=port, plain=host != LOOPBACK)
    url = server.start()
    claims = HttpStore(url, key=keys.issue("runner", expires_s=RUN_S))
    try:
        runner.serve(claims)
        yield Local(store, runner, url, timeouts)
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


def routing_of(config: TrainConfig, model: str) -> Routing:
    """Say which agents' calls the policy answers in a run, and how.

    Args:
        config: of the run.
        model: name of the policy, where agents have none of their own.
    """
    from lightning_trainer.gateway.settings import Routing

    own = parse(config.policies)
    return Routing(
        agents=tuple(own.by_agent) or config.agents or ("*",),
        model=UNKNOWN_POLICY if own.by_agent else model,
        policies=own,
        seed=config.seed,
        temperature=config.temperature,
        plain=config.sampling == "plain",
        max_tokens=config.max_tokens,
        unnamed=unnamed(config.command, config.agents, config.name_by),
        name_by=parse_rules(config.name_by),
    )


def unnamed(command: str | None, agents: Sequence[str] | None, name_by: Sequence[object] = ()) -> str | None:
    """Name the agent of a command's calls that nothing names: the only one selected, or `agent`.

    Args:
        command: the agent, where it is a command.
        agents: those selected; None: all.
        name_by: rules that name others, so that the one selected may be one of those.
    """
    if command is None:
        return None
    if agents is None or name_by:
        return UNNAMED
    return agents[0] if len(agents) == 1 and not is_glob(agents[0]) else None
