"""A server that follows the table of deployments: it routes immediately, and loads adapters in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter

from lightning_spans.errors import ConfigError, StoreError
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_trainer.gateway.calls.models import ServedModel, ServedModels
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.kits.deploy.acting import route
from lightning_trainer.kits.deploy.approvals import guard_promotions
from lightning_trainer.kits.deploy.policies.kinds import kind_of
from lightning_trainer.kits.deploy.routing import DeploymentRouter
from lightning_trainer.kits.deploy.shadow.copies import ShadowCopies
from lightning_trainer.kits.deploy.table import adapters_to_load, policies_of, read_histories
from lightning_trainer.kits.deploy.transitions import Policy, is_tried

logger = masking_logger(__name__)
EVERY_S: Final = 0.5  # seconds between reads of the table; a rollback takes effect after at most this and one read
_WHOLE_S: Final = 3.0
_CHECK_S: Final = 10.0  # seconds between checks of servers, which lose their adapters when they restart
_FIRST_S: Final = 30.0  # a server waits this long for its adapters before it reports that it is ready
KEPT: Final = 3  # earlier stable policies of an agent that stay loaded


class DeploymentTableReader:
    """Reads the table, and updates the router if it has changed.

    Args:
        store: contains the table.
        router: the router to update.
    """

    def __init__(self, store: Store, router: DeploymentRouter) -> None:
        self._store = store
        self._router = router
        self._newest: list[Deployment] = []
        self._read_s = -math.inf
        self.histories: Mapping[str, Sequence[Deployment]] = {}

    def read(self) -> bool:
        """Read the table if it has changed, and return whether it has.

        The newest row shows a change. On PostgreSQL a row may become visible after one that arrived later, so the whole
        table is also read again every `_WHOLE_S`.

        Raises:
            StoreError: it cannot be read; the earlier state stays in force.
        """
        newest = self._store.page(Deployment, newest_first=True, limit=1).records
        now_s = time.monotonic()
        if newest == self._newest and now_s - self._read_s < _WHOLE_S:
            return False
        histories = read_histories(self._store)
        self._newest, self._read_s = newest, now_s
        if histories == self.histories:
            return False
        self.histories = histories
        self._router.update({agent: policies_of(history) for agent, history in histories.items()})
        return True


class AdapterLoader:
    """Serves the adapters and prompts of deployments, each under its own name.

    Args:
        models: the served models.
        kept: number of earlier stable policies of an agent that stay loaded.
    """

    def __init__(self, models: ServedModels, kept: int = KEPT) -> None:
        self._models = models
        self._kept = kept
        self._loaded: dict[str, ServedModel] = {}
        self._retiring: dict[str, ServedModel] = {}
        self.problems: dict[str, str] = {}  # why a policy is not served, by name

    def load(self, histories: Mapping[str, Sequence[Deployment]]) -> None:
        """Load wanted policies that are missing, and unload unwanted ones that have no call in progress."""
        wanted = adapters_to_load(histories, self._kept)
        for policy in wanted.values():
            self._load(policy)
        self._check_models(histories, wanted)
        for name in self._loaded.keys() - wanted.keys():
            self._models.remove(name)
            self._retiring[name] = self._loaded.pop(name)
        for name in [name for name, served in self._retiring.items() if kind_of(name).is_idle(served)]:
            kind_of(name).unload(name, self._retiring.pop(name))

    def _load(self, policy: Policy) -> None:
        kind = kind_of(policy.name)
        try:
            kind.load(policy, self._models)
            if policy.name not in self._loaded:
                serving = self._retiring.pop(policy.name, None) or kind.serve(policy, self._models)
                self._models.add(policy.name, serving)
                self._loaded[policy.name] = serving
            self.problems.pop(policy.name, None)
        except ConfigError as error:
            self._report(policy.name, str(error))

    def _check_models(self, histories: Mapping[str, Sequence[Deployment]], wanted: Mapping[str, Policy]) -> None:
        """Report stable policies and candidates that should be models of this server and are not."""
        for current in (history[-1] for history in histories.values()):
            tried = {str(current.candidate)} if is_tried(current) else set()
            for name in sorted({current.stable, *tried} - wanted.keys()):
                if name in self._models.by_name():
                    self.problems.pop(name, None)
                else:
                    self._report(name, f"there is no model {name!r} here. Give the server --upstream {name}=URL.")

    def _report(self, name: str, problem: str) -> None:
        if self.problems.get(name) != problem:
            logger.error("the policy %s is not served: %s", name, problem)
        self.problems[name] = problem


@contextmanager
def deploying(app: Any) -> Iterator[None]:
    """Follow the table of deployments within the block.

    Args:
        app: result of `gateway.app.create_app`.
    """
    registry = app.metrics.registry
    copied = Counter(
        "lightning_shadow_copies",
        "copies of live calls for candidates in a shadow, by result",
        ["outcome"],
        registry=registry,
    )
    changes = Counter(  # not by agent: these numbers are shown to everybody
        "lightning_program_changes",
        "differences between a deployed agent's program and the one that was evaluated",
        registry=registry,
    )
    copies = ShadowCopies(app.state.store, count=lambda outcome: copied.labels(outcome).inc())
    app.state.gateway.end_with(copies.close)
    router = DeploymentRouter(app.state.store, copies, alarm=changes.inc)
    table, loader = DeploymentTableReader(app.state.store, router), AdapterLoader(app.state.models)
    app.state.gateway.register(router)
    guard_promotions(app)
    app.include_router(route.router)
    signals = _Signals()
    _read(table)  # before the first call
    for follow, whose in ((_follow, (table, signals)), (_keep_loaded, (loader, table, signals))):
        threading.Thread(target=follow, args=whose, name=f"lightning-deploy{follow.__name__}", daemon=True).start()
    signals.loaded.wait(_FIRST_S)
    try:
        yield
    finally:
        signals.stopping.set()
        signals.changed.set()


@dataclass(frozen=True, slots=True)
class _Signals:
    """Signals of the two threads: the table changed, all adapters were loaded once, the server stops."""

    changed: threading.Event = field(default_factory=threading.Event)
    loaded: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)


def _follow(table: DeploymentTableReader, signals: _Signals) -> None:
    while not signals.stopping.wait(EVERY_S):
        if _read(table):
            signals.changed.set()


def _read(table: DeploymentTableReader) -> bool:
    try:
        return table.read()
    except StoreError as error:
        logger.error("the table of deployments can't be read, so the policies do not change: %s", error)
        return False


def _keep_loaded(loader: AdapterLoader, table: DeploymentTableReader, signals: _Signals) -> None:
    while not signals.stopping.is_set():
        loader.load(table.histories)
        signals.loaded.set()
        signals.changed.wait(_CHECK_S)
        signals.changed.clear()
