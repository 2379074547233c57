"""`optimise()`: read the agents' prompts, then search for better ones in a folder that can be resumed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError, UnknownAgentError
from lightning_spans.schema.agents import check_spelling, labels, selects
from lightning_trainer.config.workers import cores
from lightning_trainer.kits.prompts import journal
from lightning_trainer.kits.prompts.options import LOOK, PromptsConfig
from lightning_trainer.kits.prompts.reading import Prompt, read_prompts
from lightning_trainer.kits.prompts.search import PromptResult, Search
from lightning_trainer.kits.prompts.session import CandidateRun, CandidateRunner
from lightning_trainer.lineage.blocks import search_folder
from lightning_trainer.lineage.facts import read_facts
from lightning_trainer.lineage.manifest import Manifest, mark_checkpoint
from lightning_trainer.lineage.reading import read_pointer
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.interrupts import SavedInterrupt, defer_interrupts
from lightning_trainer.run.learned_from import sources_of_tasks
from lightning_trainer.runner.target import JUDGE, Job
from lightning_trainer.session.answers import LocalModel, open_answers
from lightning_trainer.session.folder import check_unchanged, open_folder
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import STORE_NAME, Session, open_session

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

_TWICE: Final = 2  # minimum rollouts with calls of an agent
_MOST_LOOKS: Final = 4  # divisor of the budget: after this part of it, silent agents are no longer waited for
_STATE: Final = "prompts.json"
_LINEAGE: Final = "lineage"  # folder of the manifest, in that of the search


def optimise(
    config: PromptsConfig,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    before_removal: Callable[[Path], None] | None = None,
) -> PromptResult:
    """Search for better prompts.

    Args:
        config: the options.
        progress: callback for progress events. Default: none.
        resume: resume the search next to `config.out`.
        before_removal: called with the folder, which has the rollouts, if an agent makes too few calls.

    Raises:
        LightningError: an option, a file or the agent is wrong, GEPA is not installed, or no candidate can be tried.
    """
    progress = progress or Silent()
    if find_spec("gepa") is None:
        raise ConfigError('this needs gepa, not installed here. Run: pip install "lightning-trainer[prompts]"')
    if config.reward == JUDGE:
        raise ConfigError(
            "a judge ranks rollouts of a task against each other, "
            "and a search scores each prompt by itself. Give a reward that scores one rollout by itself: --reward"
            " module:function."
        )
    train, val = _tasks(config)
    folder = search_folder(config.out)
    state = _begin(folder, train, val, config, resume=resume)
    try:
        with (
            open_folder(folder, folder if resume else None, base=folder.parent, begun=_has_journal),
            defer_interrupts(progress.stopping) as check,
            _session(config, folder, progress) as session,
        ):
            _keep(folder, state)
            if read_pointer(folder) is None:
                _record_lineage(folder, config, (*train, *val))
            opened = CandidateRunner(session, progress, check, config.timeout_s, config.max_attempts, state["name"])
            if "prompts" in state:
                opened.skip(state["looked"], state["again"], state.get("looked_tokens", 0))  # older versions have none
            else:
                try:
                    state["prompts"] = _look(opened, (*train, *val), config, progress)
                except UnknownAgentError:
                    if before_removal is not None:
                        before_removal(folder)
                    raise
                state |= {"looked": opened.rollouts, "again": opened.again, "looked_tokens": opened.tokens}
                _keep(folder, state)
            return Search(config, opened, state["prompts"], folder, progress).run(train, val)
    except SavedInterrupt:
        if not _has_journal(folder):
            raise SavedInterrupt("stopped before any prompt was tried, so nothing was saved") from None
        raise SavedInterrupt("stopped. Continue with the same command and --resume") from None


def _session(config: PromptsConfig, folder: Path, progress: Progress) -> AbstractContextManager[Session]:
    seed = config.seed if isinstance(config.subject, LocalModel) else None  # servers get the program's own seeds
    sampling = replace(sampling_of(config), answered=config.answered, seed=seed)
    return open_session(
        Job.of(config, withheld=(folder,)),
        str(folder / STORE_NAME),
        open_answers(config.subject, **config.load),
        sampling,
        workers=config.workers or min(cores(), 2),
        concurrency=config.concurrency,
        progress=progress,
    )


def _tasks(config: PromptsConfig) -> tuple[list[Task], list[Task]]:
    tasks = load_tasks(config.data, config.columns)
    if config.val is not None:
        return tasks, load_tasks(config.val, config.columns)
    if len(tasks) < 2:
        raise ConfigError(
            f"{config.data} has one task, but the search needs at least two: one for proposals and one to compare them."
        )
    return tasks[::2], tasks[1::2]


def _begin(
    folder: Path, train: Sequence[Task], val: Sequence[Task], config: PromptsConfig, *, resume: bool
) -> dict[str, Any]:
    identity = {
        "data": digest([*train, *val]),
        "agents": list(config.agents),
        "seed": config.seed,
        "minibatch": config.minibatch,
    }
    path = folder / _STATE
    if resume:
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            what = f"Delete {folder}, and leave --resume out." if folder.exists() else "Leave --resume out."
            raise ConfigError(f"there is no search to resume in {folder}: {error}. {what}") from None
        check_unchanged(folder, state["identity"], identity)
        return state
    if folder.exists() or config.out.exists():
        onward = ", or continue with --resume" if path.exists() and _has_journal(folder) else ""
        there = folder if folder.exists() else config.out
        raise ConfigError(f"{there} already exists. Choose another --out{onward}.")
    need = config.least_budget(len(val))
    if config.budget < need:
        raise ConfigError(
            f"--budget {config.budget} "
            f"is too small: trying one proposal on {len(val)} tasks takes {need} rollouts. Give more, or fewer tasks to"
            " choose by (--val)."
        )
    return {"identity": identity, "name": uuid.uuid4().hex[:10]}


def _keep(folder: Path, state: Mapping[str, Any]) -> None:
    try:
        write_atomically(folder / _STATE, json.dumps(state).encode())
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}. Choose another --out.") from None


def _record_lineage(folder: Path, config: PromptsConfig, tasks: Sequence[Task]) -> None:
    """Write what a search learns from, before it begins: all of its tasks."""
    run = folder / _LINEAGE
    run.mkdir(exist_ok=True)
    manifest = Manifest(run)
    options = config.model_dump(mode="json", exclude={"reflect", "subject"})
    program = config.target or config.command
    manifest.begin(read_facts(options, model=config.reflect.name, data=[config.data, config.val], program=program), 0)
    manifest.add_step(0, sources_of_tasks(tasks))
    mark_checkpoint(run, folder, 1)


def _has_journal(folder: Path) -> bool:
    return (folder / journal.FILE).exists()


def _look(opened: CandidateRunner, tasks: Sequence[Task], config: PromptsConfig, progress: Progress) -> dict[str, str]:
    """Run a few tasks, more while an agent makes too few calls in them, and read the prompts from the requests."""
    most = min(len(tasks), max(LOOK, config.budget // _MOST_LOOKS))
    ran: list[CandidateRun] = []
    heard: Sequence[str] = ()
    while len(heard) < len(config.agents) and len(ran) < most:
        ran += opened.run(tasks[len(ran) : min(len(ran) + LOOK, most)], {})
        traces = [one.trace for one in ran if one.trace is not None]
        check_spelling(config.agents, {path for trace in traces for path in trace.agent_paths})
        heard = [agent for agent in config.agents if _count_rollouts(agent, traces) >= _TWICE]
    for agent in (agent for agent in config.agents if agent not in heard):
        if not (config.leave_silent and heard):
            raise UnknownAgentError(_unheard(agent, traces, len(ran)))
        progress.note(
            f"{agent}: {_count_rollouts(agent, traces)} of {len(ran)} rollouts have it, so its prompt is unchanged"
        )
    found: dict[str, Prompt] = read_prompts(traces, heard)
    for agent, prompt in found.items():
        kind = "its prompt" if prompt.whole else "the part of its prompt that is the same in every call"
        progress.note(f"{agent}: {kind} is {prompt.text[:200]!r}")
    return {agent: prompt.text for agent, prompt in found.items()}


def _count_rollouts(agent: str, traces: Sequence[Trace]) -> int:
    """Count the rollouts with calls of an agent: one rollout alone does not show what changes in its prompt."""
    return sum(any(selects((agent,), path) for path in trace.agent_paths) for trace in traces)


def _unheard(agent: str, traces: Sequence[Trace], ran: int) -> str:
    names = sorted(labels(path for trace in traces for path in trace.agent_paths).values())
    often = (
        "was never seen"
        if not _count_rollouts(agent, traces)
        else "was seen once, which is not enough to find its prompt,"
    )
    told = ", ".join(names) or "none: no call carried an agent name. Is attach() called?"
    return f"agent {agent!r} {often} in {ran} rollouts. Agents seen: {told}. Name one of these, or give other tasks."
