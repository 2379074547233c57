"""`optimise()`: reads the agents' prompts, lets GEPA propose and try others within a budget, writes what came of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.evaluation.subjects import AsItIs, Endpoint, Subject
from lightning_trainer.prompts import result
from lightning_trainer.prompts.adapter import SpansAdapter
from lightning_trainer.prompts.reading import Prompt, read_prompts
from lightning_trainer.prompts.reflection import Reflection
from lightning_trainer.prompts.session import Ran, Session, session
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import Task, digest, load_tasks
from lightning_trainer.run.interrupts import Interrupted, deferred
from lightning_trainer.runner.target import Job

_LOOK: Final = 4  # tasks that tell what an agent's prompt is
_STATE: Final = "prompts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig:
    """What to propose prompts for, and how.

    Attributes:
        data: tasks; where `val` is not given, every other one is held out to choose by.
        agents: whose prompts are proposed anew.
        reflect: the model that proposes.
        budget: rollouts.
        out: file for the result; the search's own folder lies beside it, as FILE.search.
        target: the agent, ``module:function``.
        command: the agent as a command.
        reward: ``module:function``, called as score(task, result).
        val: tasks to choose by.
        subject: what answers the agents' calls.
        tokens: most tokens, of rollouts and of the reflecting model together; None: as many as it takes.
        minibatch: tasks that a proposal is made from, and tried on first.
        seed: of GEPA's choices.
        concurrency: rollouts at once in each worker.
        timeout_s: of an attempt.
    """

    data: Path
    agents: tuple[str, ...]
    reflect: Endpoint
    budget: int
    out: Path
    target: str | None = None
    command: str | None = None
    reward: str | None = None
    val: Path | None = None
    subject: Subject = field(default_factory=AsItIs)
    tokens: int | None = None
    minibatch: int = 3
    seed: int = 0
    concurrency: int = 16
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimised:
    """What came of it.

    Attributes:
        before: mean reward of the agents' own prompts, on the tasks to choose by.
        after: that of the best prompts.
        file: with the prompts that changed.
        diff: for people.
        rollouts: that were run, those of an earlier part included.
        tokens: of rollouts and of the reflecting model, in this part.
        candidates: that were tried on all tasks to choose by.
    """

    before: float
    after: float
    file: Path
    diff: str
    rollouts: int
    tokens: int
    candidates: int

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl prompts --json` prints."""
        numbers = {name: getattr(self, name) for name in ("before", "after", "rollouts", "tokens", "candidates")}
        return {**numbers, "file": str(self.file), "changed": bool(self.diff)}


def optimise(config: PromptsConfig, progress: Progress | None = None, *, resume: bool = False) -> Optimised:
    """Look for better prompts.

    Args:
        config: for whom, and how.
        progress: told what happens; by default nobody is.
        resume: go on with the search that lies beside `config.out`.

    Raises:
        LightningError: an option, a file or the agent is wrong, GEPA is not installed, or no candidate can be tried.
    """
    progress = progress or Silent()
    if find_spec("gepa") is None:
        raise ConfigError('this needs gepa, not installed here. Run: pip install "lightning-trainer[prompts]"')
    train, val = _tasks(config)
    folder = config.out.with_name(f"{config.out.name}.search")
    state = _begin(folder, train, val, config, resume=resume)
    job = Job(target=config.target, command=config.command, reward=config.reward)
    with ExitStack() as stack:
        check = stack.enter_context(deferred())
        try:
            opened = stack.enter_context(
                session(
                    job,
                    config.subject,
                    config.agents,
                    store=str(folder / "lightning.db"),
                    progress=progress,
                    check=check,
                    concurrency=config.concurrency,
                    timeout_s=config.timeout_s,
                )
            )
            if "prompts" not in state:
                state["prompts"] = _look(opened, (*train, *val), config, progress)
                state["looked"] = opened.rollouts
                write_atomically(folder / _STATE, json.dumps(state).encode())
            return _search(config, opened, train, val, state=state, folder=folder, progress=progress)
        except Interrupted:
            raise Interrupted("stopped. Go on with the same command and --resume") from None
        except BaseException:
            if not resume and not (folder / "gepa_state.bin").exists():
                shutil.rmtree(folder, ignore_errors=True)  # nothing was tried yet
            raise


def _tasks(config: PromptsConfig) -> tuple[list[Task], list[Task]]:
    tasks = load_tasks(config.data)
    if config.val is not None:
        return tasks, load_tasks(config.val)
    if len(tasks) < 2:
        raise ConfigError(f"{config.data} has one task, and one is needed to learn from and another to choose by.")
    return tasks[::2], tasks[1::2]


def _begin(
    folder: Path, train: Sequence[Task], val: Sequence[Task], config: PromptsConfig, *, resume: bool
) -> dict[str, Any]:
    identity = {"data": digest([*train, *val]), "agents": list(config.agents), "seed": config.seed}
    path = folder / _STATE
    if resume:
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"there is no search to go on with in {folder}: {error}. Leave --resume out.") from None
        if state["identity"] != identity:
            raise ConfigError(f"{folder} is of a search with other tasks, agents or seed. Choose another --out.")
        return state
    if folder.exists() or config.out.exists():
        raise ConfigError(f"{config.out} or {folder} is there already. Choose another --out, or go on with --resume.")
    need = 2 * len(val) + 2 * config.minibatch + _LOOK
    if config.budget < need:
        raise ConfigError(
            f"--budget {config.budget} is too little: to try one proposal on {len(val)} tasks takes {need} rollouts."
            " Give more, or fewer tasks to choose by (--val)."
        )
    folder.mkdir(parents=True, mode=0o700)  # GEPA's state is a pickle: nobody else may write there
    return {"identity": identity}


def _look(opened: Session, tasks: Sequence[Task], config: PromptsConfig, progress: Progress) -> dict[str, str]:
    """Run a few tasks, and read the prompts from what was asked."""
    ran: list[Ran] = opened.run(tasks[:_LOOK], {})
    found: dict[str, Prompt] = read_prompts([one.trace for one in ran if one.trace is not None], config.agents)
    for agent, prompt in found.items():
        kind = "its prompt" if prompt.whole else "the part of its prompt that is the same in every call"
        progress.note(f"{agent}: {kind} is {prompt.text[:200]!r}")
    return {agent: prompt.text for agent, prompt in found.items()}


def _search(
    config: PromptsConfig,
    opened: Session,
    train: Sequence[Task],
    val: Sequence[Task],
    *,
    state: dict[str, Any],
    folder: Path,
    progress: Progress,
) -> Optimised:
    import gepa

    before: dict[str, str] = state["prompts"]
    reflection = Reflection(config.reflect)
    adapter = SpansAdapter(opened, before, opened.check)

    def spent(_: object) -> bool:
        return config.tokens is not None and adapter.tokens + reflection.tokens >= config.tokens

    found = gepa.optimize(
        seed_candidate=dict(before),
        trainset=list(train),
        valset=list(val),
        adapter=adapter,
        reflection_lm=reflection,
        reflection_minibatch_size=min(config.minibatch, len(train)),
        max_metric_calls=config.budget - state["looked"],
        stop_callbacks=[spent],
        run_dir=str(folder),
        callbacks=[_Told(progress)],
        logger=_Quiet(),
        seed=config.seed,
    )
    scores = found.val_aggregate_scores
    best = max(range(len(scores)), key=lambda place: (scores[place], -place))
    after = found.candidates[best]
    rollouts = int(found.total_metric_calls or 0) + state["looked"]
    facts = {"reward_before": scores[0], "reward_after": scores[best], "rollouts": rollouts}
    beside = result.write(config.out, before, after, facts)
    return Optimised(
        before=scores[0],
        after=scores[best],
        file=config.out,
        diff=beside.read_text(encoding="utf-8"),
        rollouts=rollouts,
        tokens=adapter.tokens + reflection.tokens,
        candidates=len(scores),
    )


class _Quiet:
    """GEPA's log, which nobody reads: `_Told` says what matters."""

    def log(self, message: str) -> None:
        """Say nothing."""


class _Told:
    """Tells of GEPA's steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_candidate_accepted(self, event: Any) -> None:
        """Tell of a candidate that was better on its tasks."""
        self._progress.note(f"candidate {event['new_candidate_idx']} is kept: {event['new_score']:g} on its tasks")

    def on_candidate_rejected(self, event: Any) -> None:
        """Tell of one that was not."""
        self._progress.note(f"a candidate is dropped: {event['old_score']:g} to {event['new_score']:g} on its tasks")
