"""A program that is run again: its runner, a server on the store of its record, and the models of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spans.adapter.join import GATEWAY
from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import FRAMEWORK
from lightning_trainer.config.files import CONFIG_NAME, read_kept
from lightning_trainer.config.passwords import refuse_hidden
from lightning_trainer.config.workers import worker_count
from lightning_trainer.runner.target import JUDGE, Job
from lightning_trainer.session.answers import (
    AnswerSource,
    AsItIs,
    LocalModel,
    Subject,
    open_answers,
    read_subject,
    refuse_unheard,
)
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import Session, open_runner, serve
from lightning_trainer.work import Work

if TYPE_CHECKING:
    from lightning_spans.store import Store
    from lightning_trainer.gateway.replay.record import Record
    from lightning_trainer.report.progress import Progress

INSTEAD = "instead"  # name of the weights that answer the forked call


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program to run again, and the model of its calls.

    Attributes:
        target: ``module:function``; None if `command` is given, or if the store's run names it.
        command: the agent as a command.
        reward: ``module:function``, called as score(task, result); None: the agent gives the reward.
        agents: names or globs of the agents that `subject` answers; None: those that a policy answered in the record.
        subject: model of their calls that are not in the record; None: the program's own endpoints.
        temperature: forced on their calls; None: as requested.
        max_tokens: most tokens of an answer whose request sets no limit.
        plain: whether top_p, top_k, min_p and penalties are left out, as in training.
        seed: of the samples.
        workers: worker processes; None: one per core, and no more than there is work for.
        concurrency: attempts at once in each.
        timeout_s: time limit of an attempt; None: that of its record.
        load: further options of the backend that loads weights.
        name_by: rules that name the agents of calls; see `naming`.
        work: of a command: its working directory, and the source of its reward.
        isolate: whether each attempt gets its own process; also true if the run's attempts did.
    """

    target: str | None = None
    command: str | None = None
    reward: str | None = None
    agents: tuple[str, ...] | None = None
    subject: Subject | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    plain: bool = False
    seed: int = 0
    workers: int | None = None
    concurrency: int = 16
    timeout_s: float | None = None
    load: dict[str, Any] = field(default_factory=dict)
    name_by: tuple[str, ...] = ()
    work: Work = field(default_factory=Work)
    isolate: bool = False

    def sampling_of(self, agents: Sequence[str]) -> SamplingOptions:
        """Return how calls that are not in the record are sampled.

        Args:
            agents: whose calls the subject answers, if the field `agents` names none.
        """
        return SamplingOptions(
            agents=self.agents,
            answered=self.agents or tuple(agents),
            temperature=self.temperature,
            plain=self.plain,
            max_tokens=self.max_tokens,
            seed=self.seed,
            name_by=self.name_by,
        )


def from_run(program: Program, store: str) -> Program:
    """Fill in missing options from the store's run: the program, the trained agents, the checkpoint.

    A command uses the working directory of the run's command, even if it is another command.

    Raises:
        ConfigError: no program is named, or the run's files cannot be read.
    """
    path = store.removeprefix("sqlite:///")
    run = None if "://" in path else Path(path).expanduser().parent
    values: dict[str, Any] = {}
    if run is not None and (run / CONFIG_NAME).is_file():
        values = read_kept(run, "Say what to run.")
        if program.target is None and program.command is None:
            program = replace(program, target=values.get("target"), command=values.get("command"))
            program = replace(program, reward=program.reward or values.get("reward"))
            refuse_hidden({"command": program.command})
        if program.command is not None and program.work == Work():
            program = replace(program, work=_work(values, program.reward))
        program = replace(program, name_by=program.name_by or tuple(values.get("name_by") or ()))
        program = replace(program, isolate=program.isolate or bool(values.get("isolate")))
        if program.agents is None and values.get("agents"):
            program = replace(program, agents=tuple(values["agents"]))
        if program.subject is None and (run / "checkpoint").exists():
            program = replace(
                program,
                subject=read_subject(str(run)),
                plain=values.get("sampling") == "plain",
                temperature=values.get("temperature") if program.temperature is None else program.temperature,
                max_tokens=values.get("max_tokens") if program.max_tokens is None else program.max_tokens,
            )
    if (program.target is None) == (program.command is None):
        raise ConfigError("name the agent: a TARGET module:function, or --command, and one of them.")
    return program


def _work(values: Mapping[str, Any], reward: str | None) -> Work:
    """Return where a run's command works, and the source of its reward, unless `reward` replaces it.

    Raises:
        ConfigError: an option had a password, which is not stored.
    """
    own = dict.fromkeys(("reward_command", "restore", "reward_from", "reward_range")) if reward is not None else {}
    whole = {**values, **own}
    refuse_hidden({name: whole.get(name) for name in ("workdir", "reward_command")})
    return Work.of(whole)


def refuse_unseen(program: Program, record: Record, *, allowed: bool) -> None:
    """Reject a command that records nothing itself: its tools cannot get recorded results.

    Args:
        program: program to run again.
        record: its record.
        allowed: whether all its tools may run again.

    Raises:
        ConfigError: it is such a command, and its tools may not run again.
    """
    alone = all(call.node.span.attributes.get(FRAMEWORK) == GATEWAY for call in record.calls)
    if program.command is not None and alone and not allowed:
        raise ConfigError(
            f"the command was not attached in attempt {record.attempt_id}: "
            "its model calls can be replayed, but its own tools, if any, would run again. Allow that with --run-tools"
            " '*', or attach it."
        )


def refuse_idle(program: Program, *sides: Subject | None) -> None:
    """Reject sampling options if no call is sampled here.

    Args:
        program: as requested.
        sides: models of the calls.

    Raises:
        ConfigError: the message names the options.
    """
    refuse_unheard({"temperature": program.temperature, "max_tokens": program.max_tokens}, *sides)


def refuse_judge(program: Program) -> None:
    """Reject a judge, which ranks the rollouts of a group against each other.

    Raises:
        ConfigError: the run's rewards, or the requested ones, are a judge's.
    """
    if program.reward == JUDGE:
        raise ConfigError(
            "a judge can't score forks and replays: "
            "it ranks the rollouts of a group against each other. Give a reward that scores one rollout by itself:"
            " --reward module:function."
        )


@contextmanager
def open_replays(
    program: Program,
    store: Store,
    *,
    agents: Sequence[str],
    work: int,
    progress: Progress,
    instead: Subject | None = None,
    needs_reward: bool = True,
) -> Iterator[tuple[Session, str | None]]:
    """Open a session on the store of the records, until the block ends.

    Args:
        program: program to run, and its model.
        store: contains the records; the caller closes it.
        agents: whose calls the program's subject answers, if the program does not name them.
        work: number of rollouts.
        progress: callback for progress events.
        instead: model of the forked calls, in place of the subject.
        needs_reward: whether an attempt without a reward is an error.

    Yields:
        The session, and the name of the model that answers forked calls; None without one.

    Raises:
        ConfigError: a run uses the store.
    """
    _refuse_busy(store)
    workers = worker_count(program.workers, work, 1 if program.isolate else program.concurrency)
    with ExitStack() as stack:
        job = Job.of(program, needs_reward=needs_reward)
        runner = stack.enter_context(
            open_runner(job, workers=workers, concurrency=program.concurrency, progress=progress)
        )
        main = stack.enter_context(open_answers(program.subject or AsItIs(), **program.load))
        other = AnswerSource()
        if instead is not None:
            load = {**program.load, "name": INSTEAD} if isinstance(instead, LocalModel) else program.load
            other = stack.enter_context(open_answers(instead, **load))
            if other.policies.by_agent:
                raise ConfigError(f"{instead.name} holds adapters of agents: name one model for the forked call.")
        both = replace(main, engines=[*main.engines, *other.engines], upstreams=[*main.upstreams, *other.upstreams])
        yield stack.enter_context(serve(store, runner, both, program.sampling_of(agents))), other.model


def _refuse_busy(store: Store) -> None:
    """Reject a store with queued or running rollouts: each runner would take the other's."""
    busy = len(store.rollouts(status="queued")) + len(store.rollouts(status="running"))
    if busy:
        what = (
            "1 of its rollouts is queued or running" if busy == 1 else f"{busy} of its rollouts are queued or running"
        )
        raise ConfigError(
            f"a run is using this store, or was killed: {what}. Fork when it has ended. To end a killed run:"
            " lightning-rl train --resume."
        )
