"""`improve()`: finds the best method for each agent, and keeps only what is significantly better than the base."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.errors import LightningError, UnknownAgentError
from lightning_spans.schema.agents import selects
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.kits.improve.config import OPTIONS_NAME, ImproveConfig
from lightning_trainer.kits.improve.decision import decide
from lightning_trainer.kits.improve.halving import MethodResult, rung_count
from lightning_trainer.kits.improve.measuring import Finals, HeldOutMeasurement, rollout_tokens
from lightning_trainer.kits.improve.methods import KINDS
from lightning_trainer.kits.improve.plan import SearchPlan
from lightning_trainer.kits.improve.result import RESULT_NAME, AgentResult, Improvement, write_metrics
from lightning_trainer.kits.improve.search import AgentSearch
from lightning_trainer.kits.improve.selection import StatesOfAgent, equivalent_comparisons
from lightning_trainer.kits.improve.snapshots import Snapshot, adapter_names
from lightning_trainer.kits.improve.tasks import TaskFiles
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import load_tasks
from lightning_trainer.run.folders import RUNS
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.session.folder import open_folder

_PLAN: Final = "plan.json"  # in the folder, once the budget is known to be sufficient
_TRIED: Final = 4  # tasks of a dry run
_FEWEST_TOKENS: Final = 2.0  # of any rollout with a call: one of the prompt and one of the answer


def improve(
    config: ImproveConfig, progress: Progress | None = None, *, out: Path | None = None, resume: Path | None = None
) -> Improvement:
    """Improve each agent within one budget.

    Args:
        config: options of the search; for a resumed search, the result of `read_options`.
        progress: callback for progress events. Default: none.
        out: folder; None: runs/DATE.
        resume: folder of a search to resume. Completed parts are not repeated.

    Raises:
        LightningError: an option, a file or the agent is wrong, or the budget is too small.
        SavedInterrupt: a stop was requested.
    """
    progress = progress or Silent()
    config.check()
    with open_folder(
        out, resume, base=RUNS, begun=_has_begun, resumable=lambda path: (path / OPTIONS_NAME).exists()
    ) as folder:
        try:
            if resume is None:
                config.write(folder)
                TaskFiles(folder / "tasks").write(config, progress)
            return _Search(config, folder, progress).run()
        except SavedInterrupt:
            raise SavedInterrupt(f"stopped. Resume with: lightning-rl improve --resume {folder}") from None
        except LightningError as error:
            if not _has_begun(folder):
                raise
            raise type(error)(
                f"{error}\nThe results so far are kept. Resume with: lightning-rl improve --resume {folder}"
            ) from error


def plan_search(config: ImproveConfig, progress: Progress | None = None) -> SearchPlan:
    """Return the plan of a search, based on a few rollouts of the unchanged program. Nothing is stored.

    Raises:
        LightningError: see `improve`.
    """
    progress = progress or Silent()
    config.check()
    with tempfile.TemporaryDirectory(prefix="lightning-improve-") as name:
        tasks = TaskFiles(Path(name) / "tasks")
        tasks.write(config, progress)
        _plan(config, ["*"], _FEWEST_TOKENS, tasks)  # before anything is sampled
        tried = tasks.some_to_learn(_TRIED, config.train.seed, Path(name) / "tried.jsonl")
        few = config.with_values(samples=1)
        held_out = HeldOutMeasurement(config=few, tasks=tried, progress=progress, agents=config.train.agents)
        try:
            held_out.measure_base(Path(name) / "base")
        except SavedInterrupt:
            raise SavedInterrupt("stopped. Nothing was stored: run the same command again") from None
        return _plan_from(config, held_out, tasks)


@dataclass(slots=True)
class _Search:
    """A search in its folder."""

    config: ImproveConfig
    folder: Path
    progress: Progress

    def run(self) -> Improvement:
        """Search for each agent, then decide what is kept."""
        began, tasks = time.monotonic(), TaskFiles(self.folder / "tasks")
        if not (self.folder / "base").exists():
            _plan(self.config, ["*"], _FEWEST_TOKENS, tasks).check(measured=False)  # before anything is sampled
        self.progress.note("the held-out tasks to choose by, with the unchanged agents")
        choose = HeldOutMeasurement(
            config=self.config, tasks=tasks.choose, progress=self.progress, agents=self.config.train.agents
        )
        choose.measure_base(self.folder / "base")
        plan = _plan_from(self.config, choose, tasks)
        plan.check()
        write_atomically(self.folder / _PLAN, (json.dumps(plan.to_json(), indent=2) + "\n").encode())
        for line in plan.lines():
            self.progress.note(line)
        agents = tuple(plan.agents)
        self.config = choose.config = self._name_agents(agents)
        choose.agents = agents
        names = adapter_names([*agents, *self.config.unchanged])
        searches = {
            agent: AgentSearch(
                config=self.config, agent=agent, names=names, folder=self.folder / "agents" / names[agent], tasks=tasks,
                held_out=choose, rollout_tokens=plan.rollout_tokens, progress=self.progress,
            )
            for agent in agents
        }  # fmt: skip
        found = {agent: search.run(self.config.budget // len(agents)) for agent, search in searches.items()}
        return self._decide(found, searches, began)

    def _name_agents(self, agents: Sequence[str]) -> ImproveConfig:
        return self.config.with_values(train=self.config.train.model_copy(update={"agents": tuple(agents)}))

    def _decide(
        self, found: Mapping[str, Mapping[str, MethodResult]], searches: Mapping[str, AgentSearch], began: float
    ) -> Improvement:
        """Compare each agent's best method with the base, and make the folder a run's folder with the kept changes."""
        results = {agent: AgentResult(methods=its, candidate=_best(its)) for agent, its in found.items()}
        chosen = {
            agent: (each.candidate, best.rung)
            for agent, each in results.items()
            if each.candidate is not None and (best := each.methods[each.candidate].best) is not None
        }
        changes = {agent: searches[agent].change(*state) for agent, state in chosen.items()}
        first = next(iter(searches.values()))
        choose, names = first.held_out, first.names
        held_out = HeldOutMeasurement(
            config=self.config, tasks=first.tasks.decide, progress=self.progress, agents=choose.agents
        )
        finals = Finals(
            choose=choose, fresh=held_out, names=names, changes=changes, folder=self.folder / "decide",
            chosen_by={agent: searches[agent].evaluation(*state) for agent, state in chosen.items()},
        )  # fmt: skip
        base = finals.measure_base() if changes else None
        decision = decide(
            list(changes), finals.measure, declared=self.config.train.declared,
            choices=lambda agents: self._comparisons([searches[agent] for agent in agents], finals.fresh_tasks),
        )  # fmt: skip
        before, after = finals.measured[decision.kept] if decision.kept else (base, None)
        result = Snapshot(self.folder)
        result.write(self.config.train, names, {agent: changes[agent] for agent in decision.kept})
        write_metrics(self.folder, before or choose.summarise([])[0], after)
        improvement = Improvement(
            agents=results, decision=decision, base=before, kept=after, checkpoint=result.checkpoint,
            prompts=result.prompts, budget=self.config.budget, measured=choose.tokens + held_out.tokens,
            tasks=(len(load_tasks(choose.tasks)), len(load_tasks(held_out.tasks))), folder=self.folder,
            seconds=time.monotonic() - began,
        )  # fmt: skip
        kept = without_passwords(improvement.to_json())
        write_atomically(self.folder / RESULT_NAME, (json.dumps(kept, indent=2) + "\n").encode())
        return improvement

    def _comparisons(self, searches: Sequence[AgentSearch], fresh: int) -> float:
        """Return `equivalent_comparisons` of the choice among all measured states of these agents."""
        possible = len(self.config.methods) * rung_count(len(self.config.methods))
        samples = [its for search in searches for its in search.samples.values()]
        base, *states = (each.by_task for each in searches[0].held_out.summarise(samples))
        rewards = iter(states)
        tried = [StatesOfAgent(states=[next(rewards) for _ in each.samples], possible=possible) for each in searches]
        return equivalent_comparisons(base, tried, fresh)


def _best(methods: Mapping[str, MethodResult]) -> str | None:
    """Return the method with the highest gain, the first of several; None if none has a gain."""
    best = max(methods, key=lambda name: methods[name].gain)
    return best if methods[best].gain > 0 else None


def _plan_from(config: ImproveConfig, held_out: HeldOutMeasurement, tasks: TaskFiles) -> SearchPlan:
    """Name the agents that made calls, and divide the budget between them."""
    chosen = config.train.agents or ("*",)
    found = held_out.summarise([])[0].by_agent
    selected = [name for name in found if name and selects(chosen, name)]
    seen = [name for name, its in found.items() if name and its.usage.calls]
    for name in selected:
        if name not in seen:
            rollouts = amount(len(held_out.base), "rollout")
            held_out.progress.note(f"{name} has rewards, but no call in {rollouts}, so it is not improved")
    agents = [name for name in selected if name in seen]
    if not agents:
        listed = ", ".join(seen) or "none that has a name"
        raise UnknownAgentError(f"no agent is called {', '.join(chosen)}. Agents seen: {listed}.")
    return _plan(config, agents, rollout_tokens(held_out.base), tasks)


def _plan(config: ImproveConfig, agents: Sequence[str], each: float, tasks: TaskFiles) -> SearchPlan:
    """Divide the budget between these agents, with so many tokens in each rollout, if each method could start."""
    names = adapter_names([*agents, *config.unchanged])
    methods = {
        name: KINDS[name](
            config=config, agent=agents[0], names=names, folder=tasks.folder / name, tasks=tasks, rollout_tokens=each,
            progress=Silent(),
        )
        for name in config.methods
    }  # fmt: skip
    for method in methods.values():
        method.check()
    return SearchPlan(
        agents=agents, methods=config.methods, budget=config.budget,
        least={name: method.least for name, method in methods.items()}, rollout_tokens=each,
        to_choose=len(load_tasks(tasks.choose)) * config.samples,
        to_decide=len(load_tasks(tasks.decide)) * config.samples,
    )  # fmt: skip


def _has_begun(folder: Path) -> bool:
    return (folder / _PLAN).exists()
