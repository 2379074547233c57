"""`attack()`: run tasks without an instruction and under each strategy, in one session, and compare the rewards."""

from __future__ import annotations

import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.record.prompts import system_text
from lightning_spans.schema.agents import check_known, label, selects
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.workers import worker_count
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.samples import Sample, read_samples
from lightning_trainer.kits.rewards.result import AttackResult, AttackRollout, compare_strategies
from lightning_trainer.kits.rewards.strategies import STRATEGIES, attack_prompts, instruction
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.agents import explain_no_calls
from lightning_trainer.report.failures import advice, most_frequent_error
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.rewards.callers import request_of
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.told import answer_text
from lightning_trainer.run.data import Task, load_tasks
from lightning_trainer.run.interrupts import defer_interrupts
from lightning_trainer.runner.target import JUDGE, Job
from lightning_trainer.session.answers import OF_CALLS, Subject, chosen_agents, name_rules, open_answers, refuse_unheard
from lightning_trainer.session.folder import open_folder
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import STORE_NAME, open_database, open_session

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

ATTACKS: Final = Path("attacks")  # default folder of attacks
RESULT_NAME: Final = "attack.json"
ROLLOUTS: Final = 50
_BASE: Final = "base"  # in the ids of rollouts without an instruction
_AT_ONCE: Final = 64  # traces in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackPlan:
    """Options of an attack.

    Attributes:
        evaluation: the program, its tasks and its reward, the model, and the agents to instruct.
        strategies: their names.
        rollouts: number of rollouts with an instruction, over all strategies.
    """

    evaluation: EvalConfig
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    rollouts: int = ROLLOUTS

    def __post_init__(self) -> None:
        """Reject what cannot be attacked."""
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ConfigError(f"--strategies {','.join(unknown)!r}: choose from {', '.join(STRATEGIES)}.")
        if self.rollouts < len(self.strategies):
            raise ConfigError(
                f"--attacks {self.rollouts} is less than one for each of {len(self.strategies)} strategies. Give more,"
                " or name fewer --strategies."
            )
        if self.evaluation.reward == JUDGE:
            raise ConfigError(
                "--reward judge can't be attacked: it reads the agents' prompts, and so would read the"
                " instruction of the attack. Give a reward that reads the answer alone: --reward module:function."
            )

    def rollout_places(self, tasks: int) -> dict[str, list[tuple[int, int]]]:
        """Return task and sample of each rollout, by strategy: the first tasks, repeated if there are too few.

        The rollouts without an instruction have every place that any strategy has.
        """
        found: dict[str, list[tuple[int, int]]] = {_BASE: []}
        for number in range(self.rollouts):
            slot, strategy = divmod(number, len(self.strategies))
            place = (slot % tasks, slot // tasks)
            found.setdefault(self.strategies[strategy], []).append(place)
            if strategy == 0:
                found[_BASE].append(place)
        return found


def attack(plan: AttackPlan, progress: Progress, *, key: str | None = None) -> AttackResult:
    """Attack the reward of a program.

    Args:
        plan: the options.
        progress: callback for progress events.
        key: of the endpoint.

    Raises:
        LightningError: an option, a file or the agent is wrong, or no strategy could be tried.
    """
    config = plan.evaluation
    tasks = load_tasks(config.data, config.columns)
    subject = config.subject(key)
    refuse_unheard({name: getattr(config, name) for name in OF_CALLS}, subject)
    agents = config.agents or chosen_agents(subject)
    declared = config.work.declared(command=config.command, reward=config.reward)
    config = config.with_values(
        agents=agents,
        name_by=config.name_by or name_rules(subject),
        counting=replace(config.counting, agents=agents, declared=declared),
    )
    with open_folder(config.out, base=ATTACKS, begun=_has_result, keep_interrupted=False) as folder:
        with open_database(str(folder / STORE_NAME)) as store:
            result = _AttackRun(replace(plan, evaluation=config), subject, tasks, store, folder).run(progress)
        write_atomically(folder / RESULT_NAME, (json.dumps(result.to_json(), indent=2) + "\n").encode())
    return result


def _has_result(folder: Path) -> bool:
    return (folder / RESULT_NAME).exists()


@dataclass
class _AttackRun:
    """A running attack: from the plan to the result of each rollout."""

    plan: AttackPlan
    subject: Subject
    tasks: Sequence[Task]
    store: Store
    folder: Path
    unreached: Counter[str] = field(default_factory=Counter)

    @property
    def config(self) -> EvalConfig:
        return self.plan.evaluation

    @property
    def agents(self) -> tuple[str, ...]:
        """Names and globs of the agents to instruct."""
        return self.config.agents or ("*",)

    def run(self, progress: Progress) -> AttackResult:
        name = f"attack-{uuid.uuid4().hex[:10]}"
        places = {
            strategy: {f"{name}.{strategy}:{task}-{sample}": (task, sample) for task, sample in its}
            for strategy, its in self.plan.rollout_places(len(self.tasks)).items()
        }
        outcomes, attached = self._run(places, progress)
        read = {strategy: self._read(strategy, its, outcomes) for strategy, its in places.items()}
        base = read.pop(_BASE)
        self._refuse_untried(read, list(outcomes.values()), attached)
        summary, strategies = compare_strategies(base, read, self.config.counting)
        return AttackResult(
            base=summary,
            strategies=strategies,
            rollouts=self.plan.rollouts,
            unreached=dict(self.unreached),
            folder=self.folder,
        )

    def _run(
        self, places: Mapping[str, Mapping[str, tuple[int, int]]], progress: Progress
    ) -> tuple[dict[str, Outcome], Sequence[str]]:
        """Run all rollouts, and return their outcomes by id, and the frameworks that were attached."""
        config = self.config
        rollouts = [self._rollout(each, task) for its in places.values() for each, (task, _) in its.items()]
        carried = {
            rollout_id: attack_prompts(strategy, self.agents)
            for strategy, its in places.items()
            for rollout_id in (its if strategy != _BASE else ())
        }
        logs = self.folder / "logs"
        logs.mkdir()
        with (
            defer_interrupts(progress.stopping) as check,
            open_session(
                Job.of(config, withheld=(self.folder,)),
                self.store,
                open_answers(self.subject, **config.load),
                replace(sampling_of(config), prompts=carried),
                workers=worker_count(config.workers, len(rollouts), 1 if config.isolate else config.concurrency),
                concurrency=config.concurrency,
                progress=progress,
                logs=logs,
                timeouts=config.counting.timeouts,
                failed=config.counting.failed,
            ) as session,
        ):
            found = session.run(rollouts, progress, "attacks and rollouts without one", check=check)
            return {outcome.rollout.rollout_id: outcome for outcome in found}, session.runner.attached

    def _rollout(self, rollout_id: str, task: int) -> Rollout:
        return Rollout(
            rollout_id=rollout_id,  # seeds depend on what follows the colon: the same with and without an attack
            group_id=rollout_id.rpartition("-")[0],
            task=self.tasks[task],
            mode="eval",
            max_attempts=self.config.max_attempts,
            timeout_s=self.config.timeout_s,
        )

    def _read(
        self, strategy: str, places: Mapping[str, tuple[int, int]], outcomes: Mapping[str, Outcome]
    ) -> list[AttackRollout]:
        ended, failed = [outcomes[each] for each in places], self.config.counting.failed
        samples = read_samples(self.store, places, ended, self.config.agents, failed=failed)
        traces = dict(self._traces([each.attempt_id for each in samples if each.attempt_id is not None]))
        text = "" if strategy == _BASE else instruction(strategy)
        return [
            self._attack_rollout(sample, outcomes[sample.rollout_id], traces.get(sample.attempt_id or ""), text)
            for sample in samples
        ]

    def _traces(self, attempt_ids: Sequence[str]) -> Iterator[tuple[str, Trace]]:
        for first in range(0, len(attempt_ids), _AT_ONCE):
            for trace in traces_of(self.store, attempt_ids=attempt_ids[first : first + _AT_ONCE]):
                if trace.attempt_id is not None:
                    yield trace.attempt_id, trace

    def _attack_rollout(self, sample: Sample, outcome: Outcome, trace: Trace | None, text: str) -> AttackRollout:
        chats = [node for node in trace.chats if selects(self.agents, node.path)] if trace is not None else []
        missed = [node for node in chats if text not in (system_text(request_of(node)) or "")] if text else []
        self.unreached.update(label(node.path or "", self.config.agents) for node in missed)
        answers = [answer_text(choice.message) for node in chats for choice in node.answer.choices]
        sources: defaultdict[str, float] = defaultdict(float)
        for reward in outcome.rewards:
            sources[reward.source if reward.agent is None else f"{reward.source} for {reward.agent}"] += reward.value
        return AttackRollout(
            sample=sample,
            answer=answers[-1] if answers else None,
            reached=len(missed) < len(chats),
            sources=dict(sources),
        )

    def _refuse_untried(
        self, read: Mapping[str, Sequence[AttackRollout]], outcomes: Sequence[Outcome], attached: Sequence[str]
    ) -> None:
        """Reject an attack in which nothing was tried.

        Raises:
            AgentFailedError: every rollout failed, or no instruction reached an agent.
        """
        errors = [outcome.error or "" for outcome in outcomes]
        if all(outcome.attempt is None and outcome.crash is None for outcome in outcomes):
            raise AgentFailedError(
                f"all {amount(len(outcomes), 'rollout')} failed. {most_frequent_error(errors)}\n{advice(errors)}"
            )
        if any(one.reached for its in read.values() for one in its):
            return
        if not self.unreached:
            if self.config.agents:
                seen = {name for its in read.values() for one in its for name in one.sample.usage if name}
                check_known(self.config.agents, seen)
            raise AgentFailedError(explain_no_calls(len(outcomes), attached, self.config.command))
        raise AgentFailedError(
            f"the instruction reached no call of {', '.join(sorted(self.unreached))}: "
            "it is put before a system prompt, and these agents have none. Give each agent one in the program, a first"
            " message of the role system, and"
            " call attach() there."
        )
