"""The methods: each runs an existing command's function for one agent, spends tokens up to a limit and stops.

See `costs` for what counts. Steps, rounds and proposals are always completed, so the last one may exceed the method's
limit; the excess is subtracted from its next share.
"""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from lightning_spans.errors import ConfigError, NothingToLearnError, UnknownAgentError
from lightning_trainer import registry
from lightning_trainer.backend_protocol import Backend
from lightning_trainer.config.defaults import with_defaults
from lightning_trainer.config.passwords import with_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve.config import DISTIL, PROMPTS, RL, SFT, SFT_RL, ImproveConfig, rounds_options
from lightning_trainer.kits.improve.costs import Costs, costs_of
from lightning_trainer.kits.improve.halving import Spending
from lightning_trainer.kits.improve.snapshots import Change, without_empty
from lightning_trainer.kits.improve.tasks import TaskFiles
from lightning_trainer.lineage.blocks import search_folder
from lightning_trainer.models import NEWEST
from lightning_trainer.policies import BASE
from lightning_trainer.report.log.lines import read
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.report.progress import Progress
from lightning_trainer.run.data import load_tasks
from lightning_trainer.run.folders import read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """What improves one agent works on.

    Attributes:
        config: options of the whole search; `train` names all agents.
        agent: the agent to improve.
        names: adapter of each agent that the model answers.
        folder: where the work is kept.
        tasks: the task files; a method learns from the training tasks.
        rollout_tokens: tokens of a rollout of the unchanged program.
        progress: callback for progress events.
    """

    config: ImproveConfig
    agent: str
    names: Mapping[str, str]
    folder: Path
    tasks: TaskFiles
    rollout_tokens: float
    progress: Progress


class Method(AgentTask, ABC):
    """A method for one agent. Its folder is that of its run."""

    __slots__ = ()

    @abstractmethod
    def spend(self, limit: int, rung: int) -> Spending:
        """Spend tokens up to the limit, continuing where an earlier call, or an interrupted process, stopped."""

    @abstractmethod
    def change(self) -> Change:
        """Return the result so far."""

    @property
    @abstractmethod
    def least(self) -> int:
        """Fewest tokens that the method needs."""

    @abstractmethod
    def check(self) -> None:
        """Reject options with which the method could not start.

        Raises:
            ConfigError: an option is wrong; the message says what to do.
        """

    @property
    def policies(self) -> dict[str, str]:
        """The policies of a run: this agent's own adapter, and the base for the other agents."""
        return {agent: f"lora:{name}" if agent == self.agent else BASE for agent, name in self.names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training(Method):
    """`train` for one agent, in whole steps."""

    @property
    @abstractmethod
    def run_options(self) -> dict[str, Any]:
        """Options of this method's run, in addition to the common ones."""

    @property
    def new_run(self) -> TrainConfig:
        """A new run of one step."""
        train = self.config.train
        unset = ("val", "val_every", "epochs", "until", "resume", "store", "tinker_url", "rollback_on_cliff")
        values = {name: value for name, value in without_empty(dict(train)).items() if name not in unset}
        own = {
            "data": self.tasks.train, "columns": (), "out": self.folder, "steps": 1, "keep": 1, "checkpoint": "newest",
            "agents": (self.agent,), "policies": self.policies,
        }  # fmt: skip
        return TrainConfig(**without_empty({**values, **own, **self.run_options}))

    def check(self) -> None:
        """Reject what a new run of this method rejects before anything is opened."""
        run = self.new_run
        backend: Backend = registry.by_name("backend", run.backend)
        backend.start(run, {})

    @property
    def least(self) -> int:
        """Tokens of a step, sampled and trained."""
        run = self.new_run
        groups = run.batch_size * run.group_size
        return round(self.rollout_tokens * (groups * (2 + run.resample) + run.fork_count))

    def spend(self, limit: int, rung: int) -> Spending:  # noqa: ARG002 - it continues its own run
        """Run half of the steps that the estimate allows, then as many as the cost of the earlier steps allows."""
        ended = None
        while (steps := self._affordable(limit)) and ended is None:
            taken = self._taken
            try:
                self._train(taken + steps)
            except NothingToLearnError as error:
                ended = str(error)
            except UnknownAgentError as error:  # the agent was seen in held-out tasks, so its name is valid
                ended = f"in its rollouts, {error}"
            if self._taken < taken + steps and ended is None:
                ended = "the run ended early"
        return Spending(tokens=self._costs.tokens, changed=(self.folder / NEWEST).exists(), ended=ended)

    def change(self) -> Change:
        """Return the newest checkpoint."""
        return Change(checkpoint=(self.folder / NEWEST).resolve())

    @property
    def _costs(self) -> Costs:
        return costs_of(self.folder, self.new_run.update_epochs)

    @property
    def _taken(self) -> int:
        return sum(line["kind"] == "train" for line in read(self.folder / LOG_NAME))

    def _affordable(self, limit: int) -> int:
        taken, spent = self._taken, self._costs.tokens
        each = max(1.0, spent / taken if taken else self.least)
        steps = max(0, int((limit - spent) // each))
        return max(1, steps // 2) if steps and not taken else steps

    def _train(self, steps: int) -> None:
        from lightning_trainer.run.train import train

        if (self.folder / NEWEST).exists():
            options = with_passwords(read_config(self.folder), self.new_run.model_dump(mode="json"))
            kept = {name: value for name, value in options.items() if name != "epochs"}
            run = TrainConfig(**{**kept, "resume": self.folder, "steps": steps})
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            run = self.new_run.model_copy(update={"steps": steps})
        train(run, self.progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLMethod(_Training):
    """RL with the options of the command."""

    @property
    def run_options(self) -> dict[str, Any]:
        """No further options."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilMethod(_Training):
    """On-policy distillation from the given teacher."""

    # Options of learning from rewards, which distillation rejects or sets itself.
    _OF_REWARDS: ClassVar[frozenset[str]] = frozenset(
        ("algorithm", "credit", "credit_options", "gamma", "forks", "alternatives", "orders", "fork_at", "fork_tools",
         "rewards", "normalise_std", "alone", "resample", "until", "task_order", "gae_lambda", "value_clip",
         "value_learning_rate", "kl_in", "group_size", "temperature", "with_prompts", "reflector", "prompt_options")
    )  # fmt: skip

    @property
    def run_options(self) -> dict[str, Any]:
        """The teacher, and the defaults of distillation instead of options of learning from rewards."""
        plain = {
            name: field.get_default(call_default_factory=True)
            for name, field in TrainConfig.model_fields.items()
            if name in self._OF_REWARDS
        }
        chosen = with_defaults({"algorithm": DISTIL})
        return {**plain, **chosen, **self.config.distil}


@dataclass(frozen=True, slots=True, kw_only=True)
class SftMethod(Method):
    """Rejection sampling for one agent: one run in each rung, which starts from the weights of the previous rung."""

    def check(self) -> None:
        """Reject what rounds reject before they sample."""
        from lightning_trainer.kits.sft.sft import options_of

        options_of(rounds_options(self.config, self._own_options(self.tasks.train, 1)))

    @property
    def least(self) -> int:
        """Tokens of a sampled group, and of training on its best rollout."""
        return self._cost(1)

    def _cost(self, groups: int) -> int:
        """Return the tokens of sampling so many groups, in rounds, and of training on the best of each."""
        from lightning_trainer.kits.sft.rounds.loop import round_steps

        options = rounds_options(self.config, self._own_options(self.tasks.train, 1))
        rounds = self._rounds(groups)
        rows = groups // rounds * options.kept
        learned = round_steps(options, rows) * min(rows, options.batch_size)
        return round(self.rollout_tokens * rounds * (groups // rounds * options.samples + learned))

    def _rounds(self, groups: int) -> int:
        return math.ceil(groups / len(load_tasks(self.tasks.train)))

    def spend(self, limit: int, rung: int) -> Spending:
        """Sample as many tasks as the limit allows, in several rounds if there are too few, and train on the best."""
        from lightning_trainer.kits.sft.rounds.rejection import config_to_resume, rejection_sampling
        from lightning_trainer.kits.sft.rounds.state import RESULT_NAME, STATE_NAME

        folder, ended = self._folder(rung), None
        removed: list[Costs] = []  # of samples without anything to learn, or without a call of the agent
        if not (folder / RESULT_NAME).exists():
            before = self._costs(rung - 1).tokens
            try:
                if (folder / STATE_NAME).exists():
                    again = rounds_options(self.config, self._own_options(self.tasks.train, 1)).model_dump(mode="json")
                    rejection_sampling(config_to_resume(folder, again), self.progress, resume=folder)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                    options = self._options(limit - before, rung)
                    rejection_sampling(
                        rounds_options(self.config, options), self.progress,
                        before_removal=lambda its: removed.append(costs_of(its)),
                    )  # fmt: skip
            except NothingToLearnError as error:
                ended = str(error)
            except UnknownAgentError as error:
                ended = f"in its rollouts, {error}"
        costs = sum(removed, self._costs(rung if (folder / RESULT_NAME).exists() else rung - 1))
        return Spending(tokens=costs.tokens, changed=self._newest is not None, ended=ended)

    def change(self) -> Change:
        """Return the checkpoint of the last rung."""
        return Change(checkpoint=self._newest)

    def _options(self, tokens: int, rung: int) -> dict[str, Any]:
        """Return the options of as many groups as cost so many tokens, and of one if none does."""
        groups = bisect_right(range(1, int(tokens // self.rollout_tokens) + 1), tokens, key=self._cost) or 1
        rounds = self._rounds(groups)
        seed = self.config.train.seed + rung - 1  # other tasks and samples than in the previous rung
        file = self.tasks.some_to_learn(
            groups // rounds, seed, self.folder.with_name(f"{self.folder.name}-tasks-{rung}.jsonl")
        )
        return {**self._own_options(file, rounds), "out": self._folder(rung), "seed": seed}

    def _own_options(self, tasks: Path, rounds: int) -> dict[str, Any]:
        model = self.config.train.model if self._newest is None else str(self._newest)
        return {
            "tasks": tasks, "rounds": rounds, "model": model, "agents": (self.agent,), "policies": self.policies,
        }  # fmt: skip

    def _folder(self, rung: int) -> Path:
        return self.folder / f"rung-{rung}"

    def _costs(self, rungs: int) -> Costs:
        return sum((costs_of(self._folder(rung)) for rung in range(1, rungs + 1)), Costs())

    @property
    def _newest(self) -> Path | None:
        found = sorted(self.folder.glob("rung-*/result.json"), key=lambda path: int(path.parent.name[len("rung-") :]))
        return found[-1].parent / NEWEST if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRLMethod(RLMethod):
    """RL from the weights of rejection sampling, which often learns faster at first, and stops improving earlier."""

    @property
    def run_options(self) -> dict[str, Any]:
        """The checkpoint to start from."""
        sft = SftMethod(
            config=self.config, agent=self.agent, names=self.names, folder=self.folder.parent.parent / SFT / "run",
            tasks=self.tasks, rollout_tokens=self.rollout_tokens, progress=self.progress,
        )  # fmt: skip
        return {"model": str(sft.change().checkpoint)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsMethod(Method):
    """The search for a better system prompt of one agent, with unchanged weights."""

    _ROLLOUTS: ClassVar[int] = 14  # rollouts that are enough to try one proposal on two tasks
    _TASKS: ClassVar[int] = 6  # rollouts per task for learning or choosing

    def check(self) -> None:
        """Reject nothing: `ImproveConfig.check` has examined all that a search for prompts needs."""

    @property
    def least(self) -> int:
        """Tokens of the rollouts that are enough to try one proposal."""
        return round(self.rollout_tokens * self._ROLLOUTS)

    @property
    def _file(self) -> Path:
        return self.folder / "prompts.json"

    def spend(self, limit: int, rung: int) -> Spending:  # noqa: ARG002 - it continues its own search
        """Propose and try prompts up to the limit."""
        from lightning_trainer.kits.prompts.optimise import optimise

        search = search_folder(self._file)
        self.folder.mkdir(parents=True, exist_ok=True)
        resume = (search / "prompts.json").exists()
        if not resume:
            shutil.rmtree(search, ignore_errors=True)
            self._file.unlink(missing_ok=True)
        removed: list[Costs] = []
        try:
            found = optimise(
                self._options(limit, resume=resume), self.progress, resume=resume,
                before_removal=lambda its: removed.append(costs_of(its)),
            )  # fmt: skip
        except UnknownAgentError as error:  # the agent was seen in held-out tasks, so its name is valid
            return Spending(tokens=sum(removed, Costs()).tokens, changed=False, ended=str(error))
        ended = "no prompt can earn more on its tasks" if found.ended == "ceiling" else None
        return Spending(tokens=found.tokens, changed=bool(found.diff), ended=ended)

    def change(self) -> Change:
        """Return the file with the prompt."""
        return Change(prompts=self._file)

    def _options(self, limit: int, *, resume: bool) -> Any:
        from lightning_trainer.kits.prompts.options import PromptsConfig
        from lightning_trainer.session.answers import read_subject

        train, rollouts = self.config.train, max(self._ROLLOUTS, int(limit // self.rollout_tokens))
        if self.config.reflect is None:
            raise ConfigError("prompts needs a model that proposes them: --reflect [MODEL=]URL.")
        data = self.folder / "tasks.jsonl"
        if not resume:
            self.tasks.some_to_learn(max(4, rollouts // self._TASKS), train.seed, data)
        names = (
            "target", "command", "reward", "temperature", "max_tokens", "sampling", "name_by", "work", "seed",
            "concurrency", "isolate", "timeout_s", "max_attempts", "workers",
        )  # fmt: skip
        return PromptsConfig(
            data=data, agents=(self.agent,), reflect=self.config.reflect, budget=2 * rollouts, tokens=limit,
            out=self._file, subject=read_subject(train.model), answered=tuple(self.names), load=self.config.load,
            **{name: getattr(train, name) for name in names},
        )  # fmt: skip


KINDS: Final[Mapping[str, type[Method]]] = {
    PROMPTS: PromptsMethod, SFT: SftMethod, RL: RLMethod, DISTIL: DistilMethod, SFT_RL: SftRLMethod,
}  # fmt: skip
