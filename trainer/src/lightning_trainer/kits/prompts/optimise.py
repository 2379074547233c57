"""`optimise()`: read the agents' prompts, let GEPA propose and try others within a budget, and write the result."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from lightning_spans.errors import ConfigError, LightningError, UnknownAgentError
from lightning_spans.schema.agents import check_spelling, labels, selects
from lightning_trainer.config.checked import CheckedRecord
from lightning_trainer.config.workers import cores
from lightning_trainer.kits.prompts import journal, result
from lightning_trainer.kits.prompts.adapter import SpansAdapter
from lightning_trainer.kits.prompts.reading import Prompt, read_prompts
from lightning_trainer.kits.prompts.reflection import Reflection
from lightning_trainer.kits.prompts.session import CandidateRunner, Ran
from lightning_trainer.options.measuring import MeasuringOptions
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.report.terminal import decimal
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.interrupts import Interrupted, deferred
from lightning_trainer.runner.target import JUDGE, Job
from lightning_trainer.session.answers import AsItIs, Endpoint, LocalModel, Subject, open_answers
from lightning_trainer.session.folder import check_unchanged, open_folder
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import STORE_NAME, Session, open_session

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

_LOOK: Final = 4  # number of tasks that are run at once to read the agents' prompts
_TWICE: Final = 2  # minimum rollouts with calls of an agent
_MOST_LOOKS: Final = 4  # divisor of the budget: after this part of it, silent agents are no longer waited for
_STATE: Final = "prompts.json"


class PromptsConfig(MeasuringOptions, CheckedRecord):
    """Options of `lightning-rl prompts`. Without `workers`, at most two run.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """

    agents: tuple[str, ...]
    """Whose prompts are proposed anew."""
    reflect: Endpoint
    """The model that proposes."""
    budget: int = Field(ge=1)
    """Maximum number of rollouts."""
    out: Path
    """File for the result; the search's own folder is next to it, FILE.search."""
    leave_silent: bool = False
    """Leave the prompt of an agent that does not speak while prompts are read unchanged, instead of an error."""
    val: Path | None = None
    """Tasks to choose by. Default: every other one of the tasks."""
    subject: Subject = Field(default_factory=AsItIs)
    """The model that answers the agents' calls."""
    answered: tuple[str, ...] = ("*",)
    """Agents whose calls it answers, names or globs; the others stay at their own endpoints."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of rollouts and of the reflecting model together."""
    minibatch: int = Field(default=3, ge=1)
    """Tasks that a proposal is made from, and tried on first."""
    seed: int = Field(default=0, ge=0)
    """Of GEPA's choices, and of answers that are sampled here: each batch is sampled with the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimised:
    """Result of `optimise()`.

    Attributes:
        before: mean reward of the agents' own prompts, on the validation tasks.
        after: that of the best prompts.
        file: with the changed prompts.
        diff: for people.
        rollouts: number of rollouts, including those of an earlier part.
        tokens: of rollouts and of the reflecting model, including those of an earlier part.
        candidates: number of candidates that were tried on all validation tasks.
        ended: why the search ended: ``rollouts`` or ``tokens`` were spent, or ``ceiling``: nothing is left to improve.
    """

    before: float
    after: float
    file: Path
    diff: str
    rollouts: int
    tokens: int
    candidates: int
    ended: str

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl prompts --json` prints."""
        names = ("before", "after", "rollouts", "tokens", "candidates", "ended")
        told = {name: getattr(self, name) for name in names}
        return {**told, "file": str(self.file), "changed": bool(self.diff)}


def optimise(config: PromptsConfig, progress: Progress | None = None, *, resume: bool = False) -> Optimised:
    """Search for better prompts.

    Args:
        config: the options.
        progress: callback for progress events. Default: none.
        resume: resume the search next to `config.out`.

    Raises:
        LightningError: an option, a file or the agent is wrong, GEPA is not installed, or no candidate can be tried.
    """
    progress = progress or Silent()
    if find_spec("gepa") is None:
        raise ConfigError('this needs gepa, not installed here. Run: pip install "lightning-trainer[prompts]"')
    if config.reward == JUDGE:
        raise ConfigError(
            "a judge ranks rollouts of a task against each other, and a search rates each prompt by itself. Give a"
            " reward that says how good one rollout is: --reward module:function."
        )
    train, val = _tasks(config)
    folder = config.out.with_name(f"{config.out.name}.search")
    state = _begin(folder, train, val, config, resume=resume)
    try:
        with (
            open_folder(folder, folder if resume else None, base=folder.parent, begun=_has_journal),
            deferred() as check,
            _session(config, folder, progress) as session,
        ):
            _keep(folder, state)
            opened = CandidateRunner(session, progress, check, config.timeout_s, config.max_attempts, state["name"])
            if "prompts" in state:
                opened.skip(state["looked"], state["again"])
            else:
                state["prompts"] = _look(opened, (*train, *val), config, progress)
                state |= {"looked": opened.rollouts, "again": opened.again}
                _keep(folder, state)
            return _search(config, opened, train, val, before=state["prompts"], folder=folder, progress=progress)
    except Interrupted:
        if not _has_journal(folder):
            raise Interrupted("stopped before any prompt was tried, so nothing is kept") from None
        raise Interrupted("stopped. Continue with the same command and --resume") from None


def _session(config: PromptsConfig, folder: Path, progress: Progress) -> AbstractContextManager[Session]:
    seed = config.seed if isinstance(config.subject, LocalModel) else None  # servers get the program's own seeds
    sampling = replace(sampling_of(config), answered=config.answered, seed=seed)
    return open_session(
        Job.of(config),
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
            f"{config.data} has one task, but the search needs at least two: one to learn from and one to choose by."
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
        raise ConfigError(f"{there} exists already. Choose another --out{onward}.")
    need = 2 * len(val) + 2 * config.minibatch + _LOOK
    if config.budget < need:
        raise ConfigError(
            f"--budget {config.budget} is too little: to try one proposal on {len(val)} tasks takes {need} rollouts."
            " Give more, or fewer tasks to choose by (--val)."
        )
    return {"identity": identity, "name": uuid.uuid4().hex[:10]}


def _keep(folder: Path, state: Mapping[str, Any]) -> None:
    try:
        write_atomically(folder / _STATE, json.dumps(state).encode())
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}. Choose another --out.") from None


def _has_journal(folder: Path) -> bool:
    return (folder / journal.FILE).exists()


def _look(opened: CandidateRunner, tasks: Sequence[Task], config: PromptsConfig, progress: Progress) -> dict[str, str]:
    """Run a few tasks, more while an agent makes too few calls in them, and read the prompts from the requests."""
    most = min(len(tasks), max(_LOOK, config.budget // _MOST_LOOKS))
    ran: list[Ran] = []
    heard: Sequence[str] = ()
    while len(heard) < len(config.agents) and len(ran) < most:
        ran += opened.run(tasks[len(ran) : min(len(ran) + _LOOK, most)], {})
        traces = [one.trace for one in ran if one.trace is not None]
        check_spelling(config.agents, {path for trace in traces for path in trace.agent_paths})
        heard = [agent for agent in config.agents if _heard(agent, traces) >= _TWICE]
    for agent in (agent for agent in config.agents if agent not in heard):
        if not (config.leave_silent and heard):
            raise UnknownAgentError(_unheard(agent, traces, len(ran)))
        progress.note(f"{agent}: {_heard(agent, traces)} of {len(ran)} rollouts have it, so its prompt stays as it is")
    found: dict[str, Prompt] = read_prompts(traces, heard)
    for agent, prompt in found.items():
        kind = "its prompt" if prompt.whole else "the part of its prompt that is the same in every call"
        progress.note(f"{agent}: {kind} is {prompt.text[:200]!r}")
    return {agent: prompt.text for agent, prompt in found.items()}


def _heard(agent: str, traces: Sequence[Trace]) -> int:
    """Count the rollouts with calls of an agent: one rollout alone does not show what changes in its prompt."""
    return sum(any(selects((agent,), path) for path in trace.agent_paths) for trace in traces)


def _unheard(agent: str, traces: Sequence[Trace], ran: int) -> str:
    names = sorted(labels(path for trace in traces for path in trace.agent_paths).values())
    often = "was never seen" if not _heard(agent, traces) else "was seen once, which is too rarely to find its prompt,"
    told = ", ".join(names) or "none: no call carried an agent name. Is attach() called?"
    return f"agent {agent!r} {often} in {ran} rollouts. Agents seen: {told}. Name one of these, or give other tasks."


def _search(
    config: PromptsConfig,
    opened: CandidateRunner,
    train: Sequence[Task],
    val: Sequence[Task],
    *,
    before: dict[str, str],
    folder: Path,
    progress: Progress,
) -> Optimised:
    import gepa

    paid = journal.SearchJournal(folder / journal.FILE)

    def wait() -> None:
        progress.phase("a proposal of the model that reflects")
        opened.check()

    reflection = Reflection(config.reflect, paid, wait)
    adapter = SpansAdapter(opened, before, paid)
    (folder / "gepa_state.bin").unlink(missing_ok=True)  # GEPA would resume from it, with other choices

    def out_of_tokens() -> bool:
        return config.tokens is not None and adapter.tokens + reflection.tokens >= config.tokens

    def spent(state: Any) -> bool:
        if reflection.failed is not None or adapter.at_ceiling(state):
            return True
        return not paid.waits and (opened.rollouts + opened.again >= config.budget or out_of_tokens())

    minibatch = min(config.minibatch, len(train))
    found = gepa.optimize(
        seed_candidate=dict(before),
        trainset=list(train),
        valset=list(val),
        adapter=adapter,
        reflection_lm=reflection,
        reflection_minibatch_size=minibatch,
        stop_callbacks=[spent],
        run_dir=str(folder),
        callbacks=[_StepReporter(progress, paid, minibatch)],
        logger=_Quiet(),
        seed=config.seed,
    )
    scores = found.val_aggregate_scores
    best = max(range(len(scores)), key=lambda place: (scores[place], -place))
    after, rollouts = found.candidates[best], opened.rollouts + opened.again
    if best or reflection.failed is None:
        facts = {"reward_before": scores[0], "reward_after": scores[best], "rollouts": rollouts}
        written = result.write(config.out, before, after, facts)
    if reflection.failed is not None:
        raise LightningError(_failure_message(reflection.failed, config.out if best else None, rollouts))
    return Optimised(
        before=scores[0],
        after=scores[best],
        file=config.out,
        diff=written.read_text(encoding="utf-8"),
        rollouts=rollouts,
        tokens=adapter.tokens + reflection.tokens,
        candidates=len(scores),
        ended=_ended(config, rollouts, ceiling=adapter.reached_ceiling, tokens=out_of_tokens()),
    )


def _failure_message(reason: LightningError, best: Path | None, rollouts: int) -> str:
    so_far = "Nothing better was found so far" if best is None else f"The best that was found so far is in {best}"
    return f"{reason}. {so_far}; {rollouts} rollouts are kept. Continue with --resume."


def _ended(config: PromptsConfig, rollouts: int, *, ceiling: bool, tokens: bool) -> str:
    if ceiling:
        return "ceiling"
    return "tokens" if tokens and rollouts < config.budget else "rollouts"


class _Quiet:
    """GEPA's log, which is discarded: `_StepReporter` reports what matters."""

    def log(self, message: str) -> None:
        """Discard the message."""


class _StepReporter:
    """Reports each of GEPA's steps once: the mean reward on a minibatch, of which GEPA gives the sum."""

    def __init__(self, progress: Progress, paid: journal.SearchJournal, minibatch: int) -> None:
        self._progress = progress
        self._paid = paid
        self._minibatch = minibatch

    def on_candidate_accepted(self, event: Any) -> None:
        """Report a candidate that was better on its tasks."""
        if not self._paid.waits:
            mean = self._mean(event["new_score"])
            self._progress.note(f"candidate {event['new_candidate_idx']} is kept: reward {mean} on its tasks")

    def on_candidate_rejected(self, event: Any) -> None:
        """Report a candidate that was not."""
        if not self._paid.waits:
            old, new = self._mean(event["old_score"]), self._mean(event["new_score"])
            self._progress.note(f"a candidate is dropped: reward {old} to {new} on its tasks")

    def _mean(self, total: float) -> str:
        return decimal(total / self._minibatch)
