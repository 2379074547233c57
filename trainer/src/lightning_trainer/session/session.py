"""A session: a program's workers, a store with its own queue, and a server that routes calls to a model.

Every command that runs a program uses a session, so all of them queue, sample and wait the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout, RolloutStatus
from lightning_spans.store import Store, open_store
from lightning_trainer.choices import Timeouts
from lightning_trainer.report.progress import IMPORTING, Progress
from lightning_trainer.rl.rollouts import Failed, Outcome, outcomes, settle_end
from lightning_trainer.rl.rollouts import wait as wait_for
from lightning_trainer.runner.logs import temporary_folder
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.own_queue import own_queue

if TYPE_CHECKING:
    from lightning_trainer.gateway.app import App
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.session.answers import AnswerSource
    from lightning_trainer.session.sampling import SamplingOptions

LOOPBACK: Final = "127.0.0.1"
STORE_NAME: Final = "lightning.db"  # in the folder of a run, unless --store names another
_OPEN: Final[tuple[RolloutStatus, ...]] = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running server, and the runner that claims from it.

    Attributes:
        store: the server's. Runners of this server get what is queued in it here, and nothing else that waits in the
            same database.
        runner: claims and ends rollouts with a key that permits nothing else.
        url: URL of the server, without ``/v1``.
        app: app of the server. It gives access to its routing and its replays.
        answers: the model that answers.
        timeouts: how rollouts that timed out count.
    """

    store: Store
    runner: Runner
    url: str
    app: App
    answers: AnswerSource
    timeouts: Timeouts = "count"

    def run(
        self, rollouts: Sequence[Rollout], progress: Progress, what: str, *, check: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """Queue rollouts, wait until all have ended, and return their outcomes: `queue`, then `wait`."""
        self.queue(rollouts)
        return self.wait(rollouts, progress, what, check=check)

    def queue(self, rollouts: Sequence[Rollout]) -> None:
        """Let the runner claim rollouts, after all that were queued before."""
        self.store.enqueue(rollouts)
        self.runner.wake()

    def wait(
        self, rollouts: Sequence[Rollout], progress: Progress, what: str, *, check: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """Wait until all these rollouts have ended, and return their outcomes.

        Args:
            rollouts: rollouts that were queued.
            progress: callback for the number that have ended.
            what: their name in progress events.
            check: called between polls; raises to give up.

        Raises:
            LightningError: see `rollouts.wait`; rollouts that have not ended are cancelled.
        """

        def both() -> None:
            check()
            self.runner.check()

        try:
            wait_for(
                self.store,
                rollouts,
                check=both,
                describe=self.runner.describe,
                on_progress=lambda done: progress.phase(what, done, len(rollouts)),
                ended=lambda: self.runner.ended,
            )
        except BaseException:
            self.store.cancel([rollout.rollout_id for rollout in rollouts])
            raise
        return outcomes(self.store, rollouts, self.timeouts)


@contextmanager
def open_session(
    job: Job,
    store: Store | str,
    answers: AbstractContextManager[AnswerSource],
    sampling: SamplingOptions,
    *,
    workers: int,
    concurrency: int,
    progress: Progress,
    logs: Path | None = None,
    timeouts: Timeouts = "count",
    failed: Failed = "exclude",
) -> Iterator[Session]:
    """Start a program's workers, then load or reach the model, then serve it to them until the block ends.

    Args:
        job: the program.
        store: a database, or its URL; only one that is opened here is closed here.
        answers: opens the model that answers; see `answers.open_answers`.
        sampling: which calls it answers, and how.
        workers: number of worker processes.
        concurrency: concurrent attempts in each.
        progress: callback for progress events.
        logs: folder for the program's output; None: a temporary one.
        timeouts: how rollouts that timed out count.
        failed: what failures count as. If they count, the rollout is not retried.

    Raises:
        LightningError: the program cannot be imported, or the model cannot be loaded or reached.
    """
    with ExitStack() as stack:
        runner = stack.enter_context(
            open_runner(job, workers=workers, concurrency=concurrency, logs=logs, progress=progress)
        )
        opened = stack.enter_context(open_database(store)) if isinstance(store, str) else store
        source = stack.enter_context(answers)
        yield stack.enter_context(serve(opened, runner, source, sampling, timeouts=timeouts, failed=failed))


@contextmanager
def open_runner(
    job: Job, *, workers: int, concurrency: int, progress: Progress, logs: Path | None = None
) -> Iterator[Runner]:
    """Start a program's workers, which claim nothing before `serve`, and end them after the block.

    Args:
        job: the program.
        workers: number of worker processes.
        concurrency: concurrent attempts in each.
        progress: callback that reports the import of the program.
        logs: folder for the program's output; None: a temporary one.

    Raises:
        LightningError: the program cannot be imported or called.
    """
    with ExitStack() as stack:
        folder = logs or stack.enter_context(temporary_folder("lightning-logs-"))
        progress.phase(IMPORTING)
        runner = Runner(job, workers=workers, concurrency=concurrency, logs=folder)
        stack.callback(runner.stop)
        runner.start()
        yield runner


@contextmanager
def serve(
    store: Store,
    runner: Runner,
    answers: AnswerSource,
    sampling: SamplingOptions,
    *,
    port: int = 0,
    host: str = LOOPBACK,
    keys: Keys | None = None,
    extend: Callable[[App], None] | None = None,
    timeouts: Timeouts = "count",
    failed: Failed = "exclude",
) -> Iterator[Session]:
    """Serve the store and the model, and let a started runner claim rollouts, until the block ends.

    Only what is queued in `Session.store`, or over the server's API, is claimed.

    Args:
        store: closed by the caller.
        runner: stopped by the caller, after the block.
        answers: the model.
        sampling: which calls it answers, and how.
        port: 0 takes a free one.
        host: address to listen on. If it is not this machine's loopback address, traffic is not encrypted.
        keys: keys of the server; None: new ones, which nobody else has.
        extend: adds routes to the server's app.
        timeouts: how rollouts that timed out count.
        failed: what failures count as. If they count, the rollout is not retried.

    Raises:
        ConfigError: the port is in use.
    """
    from lightning_spans.store.http import HttpStore
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import RUN_S, Keys
    from lightning_trainer.gateway.http.serving import ServerThread

    keys, store = keys or Keys.fresh(), own_queue(store, partial(settle_end, timeouts=timeouts, failed=failed))
    routing = sampling.routing(answers, runner.job.command)
    app = create_app(store, keys=keys, engine=answers.engines, upstreams=answers.upstreams, routing=routing)
    if extend is not None:
        extend(app)
    server = ServerThread(app, host=host, port=port, plain=host != LOOPBACK)
    url = server.start()
    claims = HttpStore(url, key=keys.issue("runner", expires_s=RUN_S))
    try:
        runner.serve(claims)
        yield Session(store=store, runner=runner, url=url, app=app, answers=answers, timeouts=timeouts)
    finally:
        runner.stop()
        claims.close()
        server.stop()


@contextmanager
def open_database(url: str) -> Iterator[Store]:
    """Open a store on this machine, and close it after the block.

    Raises:
        ConfigError: it belongs to another server, which has its own gateway and queue.
    """
    if url.startswith(("http://", "https://")):
        raise ConfigError(f"store {url}: give a database (a path, sqlite:/// or postgresql://), not a server.")
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def cancel_left_over(store: Store) -> None:
    """Cancel the rollouts that an earlier process left in a store: nobody waits for them any more."""
    store.cancel([rollout.rollout_id for status in _OPEN for rollout in store.rollouts(status=status)])
