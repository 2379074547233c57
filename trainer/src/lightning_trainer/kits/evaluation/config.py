"""What to evaluate, on what, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_spans.errors import ConfigError
from lightning_spans.record.prompts import Prompts, read_prompts
from lightning_trainer import registry
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.rl.rollouts import Failed
from lightning_trainer.session.answers import AsItIs, Subject, endpoint, read_subject
from lightning_trainer.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What to evaluate, on what, and how.

    Attributes:
        data: tasks.
        target: the agent, ``module:function``; None where `command` is given.
        command: the agent as a command.
        reward: ``module:function``, called as score(task, result), or ``judge``; None: the agent gives the reward.
        judge: options of a judge, see `judging.options`.
        model: what answers: a run, a checkpoint, a model folder, a hub id; with `endpoint` the name that it is asked
            for. None: the program's own endpoints.
        endpoint: URL of an OpenAI-compatible server.
        against: what it is compared with: an evaluation of the same tasks, or anything that can be evaluated.
        prompts: file of `lightning-rl prompts`: its system prompts are put in the place of the agents' own.
        agents: names or globs of the agents that are answered; None: those that the run trained, else all with a name.
        tasks: only the first so many.
        samples: executions of each task.
        counting: how they count.
        temperature: forced on the calls; None: as asked.
        max_tokens: most tokens of an answer that names no limit.
        sampling: whether top_p, top_k, min_p and penalties hold as agents ask for them, or are left out as in training.
        seed: of the draws; None: 0 for weights that are loaded here, and none for endpoints.
        timeout_s: time limit of an attempt.
        max_attempts: tries of what failed by no fault of the model's.
        workers: worker processes; None: one a core, and no more than there is work for.
        concurrency: attempts at once in each.
        isolate: whether each attempt gets a process of its own, and in it the functions get the main thread.
        out: folder; None: evals/DATE.
        store: URL; None: SQLite in the folder.
        load: further options of the backend that loads weights.
        name_by: rules that name the agents of calls, see `naming`; (): those of the run.
        columns: of the tasks to read; empty: all.
        work: of a command: where it works, and what gives its reward.
    """

    data: Path
    target: str | None = None
    command: str | None = None
    reward: str | None = None
    judge: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    endpoint: str | None = None
    against: str | None = None
    prompts: Path | None = None
    agents: tuple[str, ...] | None = None
    tasks: int | None = None
    samples: int = 1
    counting: Counting = field(default_factory=Counting)
    temperature: float | None = None
    max_tokens: int | None = None
    sampling: Literal["plain", "asked"] = "asked"
    seed: int | None = None
    timeout_s: float = 300.0
    max_attempts: int = 2
    workers: int | None = None
    concurrency: int = 16
    isolate: bool = False
    out: Path | None = None
    store: str | None = None
    load: dict[str, Any] = field(default_factory=dict)
    name_by: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        """Refuse a tool format that nothing registers."""
        registry.check("tool format", self.load.get("tool_format"))

    def subject(self, key: str | None) -> Subject:
        """Return what is evaluated.

        Raises:
            ConfigError: it is given wrongly.
        """
        if self.endpoint is not None:
            return endpoint(self.endpoint, model=self.model, key=key)
        return AsItIs() if self.model is None else read_subject(self.model, key=key)

    def read_prompts(self) -> Prompts:
        """Read the prompts that are put in the place of the agents' own; {} for none.

        Raises:
            ConfigError: they can't be read.
        """
        return read_prompts(self.prompts) if self.prompts is not None else {}

    def to_json(self) -> dict[str, Any]:
        """Return it as kept in the evaluation's folder."""
        paths = {
            name: None if (path := getattr(self, name)) is None else str(path) for name in ("data", "out", "prompts")
        }
        return {**asdict(self), **paths}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EvalConfig:
        """Read what `to_json` gave.

        Raises:
            ConfigError: it is of another version.
        """
        try:
            failed: Failed = values["counting"]["failed"]
            timeouts = values["counting"].get("timeouts", "exclude")  # as it was before there was a choice
            counting = Counting(failed=failed, success=values["counting"]["success"], timeouts=timeouts)
            agents = None if values["agents"] is None else tuple(values["agents"])
            prompts = None if values.get("prompts") is None else Path(values["prompts"])
            made: dict[str, Any] = {"data": Path(values["data"]), "out": None, "prompts": prompts, "agents": agents}
            made |= {
                "work": Work(**values["work"]),
                "name_by": tuple(values["name_by"]),
                "columns": tuple(values.get("columns", ())),
                "counting": counting,
            }
            return cls(**{**values, **made})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this evaluation can't be resumed: its options can't be read: {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerKeys:
    """Bearer keys of servers, which are kept nowhere.

    Attributes:
        endpoint: of what is evaluated.
        against: of what it is compared with.
    """

    endpoint: str | None = field(default=None, repr=False)
    against: str | None = field(default=None, repr=False)
