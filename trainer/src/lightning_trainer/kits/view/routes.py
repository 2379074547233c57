"""``/api/view``: the requests of the pages. Only marks are written; each answer is read anew from store and folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from lightning_spans.errors import RefusedError, StoreError
from lightning_spans.schema.json import dumps
from lightning_spans.store.traces import each_trace
from lightning_trainer.gateway.auth.access import Needs
from lightning_trainer.gateway.intake.route import KeyedRoute
from lightning_trainer.kits.deploy.approvals import Approvals
from lightning_trainer.kits.view.answers.calls import CallPage
from lightning_trainer.kits.view.answers.deployments import DeploymentPage, DeploymentsPage, FindingsPage, LoopRow
from lightning_trainer.kits.view.answers.groups import Facts, GroupPage, StepPage, TriesPage
from lightning_trainer.kits.view.answers.learning import AccountPage, CreditPage, RewardsPage
from lightning_trainer.kits.view.answers.marks import MarkChange, MarksPage
from lightning_trainer.kits.view.answers.rollouts import RolloutPage
from lightning_trainer.kits.view.answers.runs import RunPage, RunRow, ScalePage, StepRow
from lightning_trainer.kits.view.answers.store import FleetPage, LoosePage, SearchPage, ToolsPage
from lightning_trainer.kits.view.deployments import DeploymentReader, agent_page, agent_row, has_deployments
from lightning_trainer.kits.view.findings import findings_page
from lightning_trainer.kits.view.loops import Loops
from lightning_trainer.kits.view.marks import change_mark, marks_of
from lightning_trainer.kits.view.names import chosen_by
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading import others
from lightning_trainer.kits.view.reading.calls import call_page
from lightning_trainer.kits.view.reading.headline import headline_of
from lightning_trainer.kits.view.reading.learning import account_of, credit_of
from lightning_trainer.kits.view.reading.policies import policies_of
from lightning_trainer.kits.view.reading.rollouts import as_it_went, loose_trace, page_of, side_by_side, trace_of
from lightning_trainer.kits.view.reading.scale import scale_of
from lightning_trainer.kits.view.reading.search import search as search_page
from lightning_trainer.kits.view.reading.steps import group_ids, groups_page, has_loose, overview, rollouts_in
from lightning_trainer.kits.view.reading.summaries import run_row
from lightning_trainer.kits.view.reading.tools import UsageCounter
from lightning_trainer.kits.view.reading.transcripts import facts_of
from lightning_trainer.kits.view.reading.tries import tries_of, tries_page
from lightning_trainer.kits.view.runs import Run, Runs
from lightning_trainer.report.log.lines import MOST_FREQUENT, PROMPTS
from lightning_trainer.report.metrics import newest_validations
from lightning_trainer.rl.scores import BY_TASK
from lightning_trainer.run.group_ids import Step

MAY: Final = Needs("viewer", "admin")
_GROUPS: Final = 200  # groups in a page
_FACTS: Final = 32  # rollouts counted at once
_POLL_S: Final = 1.0

_Run = Annotated[str, Query(description="name of the run", alias="run")]
_Limit = Annotated[int, Query(ge=1, le=_GROUPS)]
_After = Annotated[int, Query(ge=0, le=2**63 - 1)]  # range of a database's integers
_Before = Annotated[int | None, Query(ge=0, le=2**63 - 1)]
_Look: TypeAlias = tuple[tuple[int, ...], str]  # a run's mark, and its state
_Text = Annotated[str, Query(min_length=1, max_length=500)]


class Views:
    """The state of the routes; `app.state.views` is one.

    Args:
        runs: runs that may be requested.
        tokenizers: folders with the tokenizer of the models shown; they come before those that a run names.
        loops: folder of a loop, or of several; shown with a store that no run's folder names. None: no loop.
    """

    def __init__(self, runs: Runs, tokenizers: Sequence[Path] = (), loops: Path | None = None) -> None:
        self.runs = runs
        self.tokenizers = tokenizers
        self.loops = Loops(loops)
        self.deployments = DeploymentReader()
        self.stopping = threading.Event()  # set when the server stops, which waits for streaming answers

    def named(self, name: str) -> Run:
        """Return a run.

        Raises:
            RefusedError: there is no run of that name.
        """
        found = next((run for run in self.runs.all() if run.name == name), None)
        if found is None:
            raise RefusedError(f"there is no run {name!r} here")
        return found

    def loops_of(self, run: Run) -> list[LoopRow]:
        """Return the loops, which are shown with a store that no run's folder names."""
        return self.loops.rows() if run.folder is None else []

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[Run, StoreReader]]:
        """Open a run's store, to read it for one answer.

        Raises:
            RefusedError: there is no run of that name, or no store in its folder.
        """
        run = self.named(name)
        if run.folder is not None and not run.has_store:
            raise RefusedError(f"the run {name!r} has no store: only its metrics are known")
        reader = StoreReader(run.store)
        try:
            yield run, reader
        finally:
            reader.close()


def views_of(request: Request) -> Views:
    """Return the views of the requested app."""
    views: Views = request.app.state.views
    return views


_Views = Annotated[Views, Depends(views_of)]
router: Final = APIRouter(prefix="/api/view", route_class=KeyedRoute, dependencies=[Depends(MAY)], tags=["view"])


@router.get("/runs")
def runs(views: _Views) -> list[RunRow]:
    """Return the runs, the newest first."""
    return [run_row(run) for run in views.runs.all()]


@router.get("/run")
def run_page(views: _Views, name: _Run) -> RunPage:
    """Return a run: options, metrics per step, alarms, and the contents of its store."""
    run = views.named(name)
    lines = run.lines()
    held_out = newest_validations(lines)
    loose, steps = False, list[StepRow]()
    if run.folder is None or run.has_store:
        with views.opened(name) as (_, reader):
            steps = overview(reader, run)
            with reader.reading() as connection:
                loose = has_loose(connection)
    return RunPage(
        name=run.name,
        options=run.shown_options,
        train=[line for line in lines if line["kind"] == "train"],
        val=[{name: value for name, value in line.items() if name not in {BY_TASK, PROMPTS}} for line in held_out],
        alarms=[line for line in lines if line["kind"] == "alarm"],
        steps=steps,
        loose=loose,
        headline=headline_of(run, lines, steps),
        policies=policies_of(run, lines, held_out),
        most_frequent=next((line[MOST_FREQUENT] for line in reversed(lines) if line.get(MOST_FREQUENT)), {}),
    )


@router.get("/scale")
def scale(views: _Views, name: _Run) -> ScalePage:
    """Return what all pages of a run share: the ends of its scale of rewards, its agents, whether they are deployed."""
    run = views.named(name)
    if run.folder is not None and not run.has_store:
        return scale_of(run, None, deployed=False)
    with views.opened(name) as (_, reader):
        return scale_of(run, reader, deployed=run.folder is None or has_deployments(reader))


@router.get("/step")
def step_page(
    views: _Views, name: _Run, *, step: int = 0, mode: str = "train", after: _After = 0, limit: _Limit = 50
) -> StepPage:
    """Return groups of a step with their rollouts and rewards."""
    with views.opened(name) as (run, reader):
        return groups_page(reader, run, Step(mode, step), after=after, limit=limit)


@router.get("/facts")
def facts(
    views: _Views,
    name: _Run,
    rollout: Annotated[list[str], Query(max_length=_FACTS)],
    text: Annotated[str, Query(max_length=500)] = "",
) -> list[Facts]:
    """Return the counts of some rollouts' traces, and whether they contain a text."""
    with views.opened(name) as (run, reader):
        return [facts_of(trace, text=text, chosen=chosen_by(run)) for trace in each_trace(reader, rollout_ids=rollout)]


@router.get("/group")
def group_page(views: _Views, name: _Run, group: str, after: _After = 0) -> GroupPage:
    """Return a group side by side: each rollout's transcript, and how many first calls all share."""
    with views.opened(name) as (run, reader):
        return side_by_side(reader, run, group, after=after)


@router.get("/tries")
def tries(
    views: _Views,
    name: _Run,
    *,
    group: str | None = None,
    worse: bool = False,
    after: _After = 0,
    limit: _Limit = 50,
) -> TriesPage:
    """Return tasks that were run at several times, the most improved first; or the one of a group."""
    with views.opened(name) as (run, reader):
        if group is not None:
            return tries_of(reader, run, group)
        return tries_page(reader, run, worse=worse, after=after, limit=limit)


@router.get("/rollout")
def rollout_page(views: _Views, name: _Run, rollout: str, attempt: str | None = None) -> RolloutPage:
    """Return an attempt of a rollout with its events: by default the one that counts."""
    with views.opened(name) as (run, reader):
        return as_it_went(reader, run, rollout, attempt)


@router.get("/trace")
def trace_page(views: _Views, name: _Run, trace: str) -> RolloutPage:
    """Return a trace that belongs to no rollout, with its events."""
    with views.opened(name) as (run, reader):
        return page_of(run, reader, None, loose_trace(reader, trace), attempts=[], members=[], row=None)


@router.get("/call")
def call(
    views: _Views,
    name: _Run,
    span: str,
    *,
    rollout: str | None = None,
    attempt: str | None = None,
    trace: str | None = None,
    whole: bool = False,
) -> CallPage:
    """Return a model call: of an attempt, or of a trace that belongs to none."""
    with views.opened(name) as (run, reader):
        if rollout is not None:
            asked, found = trace_of(run, reader, rollout, attempt)
        else:
            asked, found = None, loose_trace(reader, trace or "")
        group = asked.group_id if asked is not None else None
        return call_page(reader, run, found, span, group_id=group, tokenizers=views.tokenizers, whole=whole)


@router.get("/account")
def account(views: _Views, name: _Run, step: int) -> AccountPage:
    """Return the account of a step: from calls seen to calls trained, each loss with some of its calls."""
    with views.opened(name) as (run, reader):
        return account_of(reader, run, step)


@router.get("/credit")
def credit(views: _Views, name: _Run, step: int | None = None, credit: str | None = None) -> CreditPage:
    """Return credit by agent and turn of a step, or of the whole run, by the run's credit assigner or another."""
    with views.opened(name) as (run, reader):
        return credit_of(reader, run, step, credit)


@router.get("/rewards")
def rewards(views: _Views, name: _Run, step: int = 0, mode: str = "train") -> RewardsPage:
    """Return the rewards of a step by source."""
    with views.opened(name) as (run, reader):
        return others.rewards_page(reader, run, Step(mode, step))


@router.get("/tools")
def tools(views: _Views, name: _Run, step: int = 0, mode: str = "train") -> ToolsPage:
    """Return the tools and model calls of a step: errors, latency, tokens."""
    with views.opened(name) as (run, reader):
        counted = UsageCounter(chosen_by(run))
        rollouts = rollouts_in(reader, group_ids(reader, run, Step(mode, step)))
        ids = [each.rollout_id for each in rollouts]
        for at in range(0, len(ids), _FACTS):
            for trace in each_trace(reader, rollout_ids=ids[at : at + _FACTS]):
                counted.add(trace)
        return counted.page()


@router.get("/fleet")
def fleet(views: _Views, name: _Run) -> FleetPage:
    """Return the runners, the queue, and the running attempts."""
    with views.opened(name) as (_, reader):
        return others.fleet_page(reader)


@router.get("/deployments")
def deployments(views: _Views, name: _Run) -> DeploymentsPage:
    """Return the agents that have a deployment, and the loops."""
    with views.opened(name) as (run, reader):
        histories = views.deployments.histories(run, reader)
        rows = [agent_row(history) for _, history in sorted(histories.items())]
        return DeploymentsPage(agents=rows, loops=views.loops_of(run))


@router.get("/deployment")
def deployment(
    request: Request, views: _Views, name: _Run, agent: str, *, before: _Before = None, limit: _Limit = 50
) -> DeploymentPage:
    """Return an agent's policies and some of its transitions, the newest first."""
    with views.opened(name) as (run, reader):
        history = views.deployments.history(run, reader, agent)
        return agent_page(run, history, before=before, limit=limit, acts=_approvals(request) is not None)


@router.get("/findings")
def findings(request: Request, views: _Views, name: _Run, agent: str) -> FindingsPage:
    """Return what is known about an agent's candidate: gate, guardrails, shadow, program, and what is missing."""
    with views.opened(name) as (run, reader):
        history = views.deployments.history(run, reader, agent)
        known = views.deployments.findings(run, reader, history)
        approvals = _approvals(request)
        served = None if approvals is None else request.app.state.models.by_name()
        return findings_page(history, known, approvals, served)


def _approvals(request: Request) -> Approvals | None:
    """Return what verifies approvals; None if this is not the server that follows the table of deployments."""
    found: Approvals | None = getattr(request.app.state, "approvals", None)
    return found


@router.get("/loose")
def loose(views: _Views, name: _Run, before: _Before = None) -> LoosePage:
    """Return traces that belong to no rollout, the newest first."""
    with views.opened(name) as (_, reader):
        return others.loose_page(reader, before=before)


@router.get("/search")
def search(views: _Views, name: _Run, text: _Text, *, after: _After = 0, calls: bool = False) -> SearchPage:
    """Search all spans of the store, then its other calls; a page searches for a second at most."""
    with views.opened(name) as (run, reader):
        return search_page(reader, run, text, after=after, calls=calls)


@router.get("/marks")
def marks(views: _Views, name: _Run) -> MarksPage:
    """Return the marks of a run, the newest first."""
    with views.opened(name) as (run, reader):
        return MarksPage(marks=marks_of(reader, run))


@router.post("/marks")
def mark(views: _Views, change: MarkChange) -> MarksPage:
    """Save or remove a mark, which everybody with access then sees. Returns all marks."""
    with views.opened(change.run) as (run, reader):
        change_mark(reader, run, change)
        return MarksPage(marks=marks_of(reader, run))


@router.get("/events", response_class=StreamingResponse)
async def events(request: Request, views: _Views, name: _Run) -> StreamingResponse:
    """Send a server-sent event whenever something was written to a run's folder or store."""
    run = views.named(name)

    async def changes() -> AsyncIterator[bytes]:
        seen: _Look | None = None
        quiet = 0
        while not views.stopping.is_set() and not await request.is_disconnected():
            now = await asyncio.to_thread(_look_at, run, views, seen)
            quiet = 0 if now != seen else quiet + 1
            if now is not None and now != seen:
                yield b"event: changed\ndata: " + dumps({"first": seen is None, "state": now[1]}) + b"\n\n"
                seen = now
            elif quiet % 15 == 0:
                yield b": still here\n\n"
            await asyncio.sleep(_POLL_S)

    return StreamingResponse(changes(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _look_at(run: Run, views: Views, before: _Look | None) -> _Look | None:
    """Return a run's mark and its state; the previous ones while its store does not answer."""
    try:
        mark = (*run.changed, *(views.loops.mark if run.folder is None else ()))
        if before is not None and before[0] == mark and before[1] != "running":
            return before  # a run that starts changes the mark
        return mark, run.state
    except StoreError:
        return before
