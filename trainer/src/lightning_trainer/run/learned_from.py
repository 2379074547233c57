"""What a run and each of its batches learn from, for the manifest of its checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_trainer.lineage.facts import read_facts
from lightning_trainer.lineage.manifest import RunFacts, StepSources, sorted_once
from lightning_trainer.lineage.permits import split_tenants
from lightning_trainer.session.programs import digest, system_prompt

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.batch import Batch

Task: TypeAlias = "Mapping[str, Any]"


def run_facts(config: TrainConfig) -> RunFacts:
    """Return what a run starts from: its model, its data, the program's code, its options."""
    return read_facts(
        config.model_dump(mode="json"),
        model=str(config.model),
        data=[config.data, config.val],
        program=config.target or config.command,
    )


def sources_of(batch: Batch, traces: Iterable[Trace], tasks: Mapping[str, Task]) -> StepSources:
    """Return what a batch is made of.

    Args:
        batch: its rows are learned, and all rewards of its groups are compared.
        traces: at least those of the batch's attempts.
        tasks: at least those of the batch's rollouts, by rollout. A task that was made of a live trace names it, and
            its tenants.
    """
    rows = {(row.attempt_id, span_id) for row in batch.rows for span_id, _ in row.calls}
    attempts = {row.attempt_id for row in batch.rows}
    nodes = [(trace, node) for trace in traces if trace.attempt_id in attempts for node in trace.chats]
    learned = [node for trace, node in nodes if (trace.attempt_id, node.span.span_id) in rows]
    rewards = (*batch.given, *batch.automatic)
    prompts: defaultdict[str, set[str]] = defaultdict(set)
    for call in batch.calls:
        prompts[call.transition.agent or ""].add(digest(system_prompt(call.transition.request)))
    rollouts = sorted_once(row.rollout_id for row in batch.rows)
    return replace(
        sources_of_tasks(tasks.get(one, {}) for one in rollouts),
        calls=sorted_once(node.call.call_id for node in learned if node.call is not None),
        rewards=sorted_once(reward.reward_id for reward in rewards),
        rollouts=rollouts,
        attempts=sorted_once(attempts),
        traces=sorted_once(node.span.trace_id for node in learned),
        sources=sorted_once(reward.source for reward in rewards),
        prompts={agent: sorted(digests) for agent, digests in sorted(prompts.items())},
    )


def sources_of_tasks(tasks: Iterable[Task]) -> StepSources:
    """Return the live traces that tasks were made of, and their tenants."""
    live = [task for task in tasks if _text(task, "trace_id")]
    return StepSources(
        tasks=sorted_once(_text(task, "trace_id") for task in live),
        tenants=sorted_once(name for task in live for name in split_tenants(_text(task, "tenant"))),
    )


def _text(task: Task, name: str) -> str:
    value = task.get(name)
    return value if isinstance(value, str) else ""
