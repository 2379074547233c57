"""Metrics of a step besides rewards and the update: groups, lengths, tools, staleness, tokens.

The names are those in metrics.jsonl and in TensorBoard. ``/NAME`` is an agent's or a tool's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lightning_spans.schema.spans import TOOL_NAME
from lightning_trainer.policies import BASE
from lightning_trainer.reasons.continuation import MALFORMED, UNREAD
from lightning_trainer.rl.rows import UNKNOWN_VERSION, Row
from lightning_trainer.rl.usage import tokens_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace
    from lightning_trainer.gateway.engine import Engine
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rollouts import Outcome

INFRASTRUCTURE: Final = "infrastructure/"  # how names of attempts' endings begin that are its fault


class TraceCache:
    """Reads traces, and keeps them for later counts."""

    def __init__(self, read: Callable[[Sequence[str]], Iterable[Trace]]) -> None:
        self._read = read
        self._kept: dict[str | None, Trace] = {}  # by attempt: each once, however often it is read

    @property
    def found(self) -> list[Trace]:
        """All traces that were read."""
        return list(self._kept.values())

    def __call__(self, attempt_ids: Sequence[str]) -> list[Trace]:
        """Return the traces of these attempts."""
        traces = list(self._read(attempt_ids))
        self._kept |= {trace.attempt_id: trace for trace in traces}
        return traces


def of_traces(traces: Iterable[Trace]) -> dict[str, float]:
    """Return what agents and tools did, as numbers.

    Returns:
        ``calls_per_rollout`` and ``response_tokens`` (mean of a call), both also by agent; ``truncated``, the share of
        answers that were truncated at their limit, also by agent; ``calls_unread``, the share of answers that look like
        tool calls in another format than the one that is read, if there are any, also by format; ``calls_malformed``,
        the share with malformed calls in the format that is read; ``tool_calls`` and ``tool_error_rate``, both also by
        tool; ``tokens_prompt`` and ``tokens_generated``, totals of the model calls. What never happened is left out.
    """
    lengths: dict[str, list[int]] = defaultdict(list)
    cut: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    prompt_tokens = attempts = 0
    for trace in traces:
        attempts += 1
        for node in trace.chats:
            agent = node.span.agent or ""
            prompt, response = tokens_of(node)
            prompt_tokens += prompt
            lengths[agent].append(response)
            cut[agent] += any(choice.finish_reason == "length" for choice in node.answer.choices)
            told = node.call.sampling.get(UNREAD) if node.call is not None else None
            unread.update(set(told.values()) if isinstance(told, Mapping) else ())
        for node in trace.tools:
            name = tool_name(node)
            tools[name] += 1
            errors[name] += node.span.status == "error"
    return {
        **_lengths(lengths, cut, attempts),
        **_rates(tools, errors),
        **_unread(unread, sum(map(len, lengths.values()))),
        "tokens_prompt": float(prompt_tokens),
        "tokens_generated": float(sum(map(sum, lengths.values()))),
    }


def tool_name(node: Node) -> str:
    """Return the name of a tool call's tool."""
    named = node.span.attributes.get(TOOL_NAME)
    return str(named) if named else node.span.name or "unnamed"


def count_compared(batch: Batch) -> tuple[int, int]:
    """Return the number of groups that were compared, also of replaced ones, and how many had nothing to compare."""
    groups = batch.compared_groups
    return len(groups), len(groups & batch.flat_groups)


def of_groups(groups: int, flat: int) -> dict[str, float]:
    """Return the number of compared groups, and the share of them that had nothing to compare."""
    return {"groups": float(groups), "groups_without_signal": flat / groups} if groups else {"groups": 0.0}


def of_rows(rows: Iterable[Row], versions: Mapping[str, int]) -> dict[str, float]:
    """Return the age of the training rows: updates since they were sampled.

    Args:
        rows: of the step.
        versions: number of each policy's weights, by its name, before the update.

    Returns:
        ``staleness``, the mean over rows whose version is known, and ``staleness_max``.
    """
    known = [row for row in rows if row.policy in versions and row.policy_version != UNKNOWN_VERSION]
    return of_ages([versions[row.policy] - row.policy_version for row in known])


def of_ages(ages: Sequence[int]) -> dict[str, float]:
    """Return ``staleness`` and ``staleness_max`` for these ages, in updates."""
    return {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))} if ages else {}


def _lengths(lengths: Mapping[str, Sequence[int]], cut: Mapping[str, int], attempts: int) -> dict[str, float]:
    every = [length for own in lengths.values() for length in own]
    if not every:
        return {}
    found = {
        "calls_per_rollout": len(every) / attempts,
        "response_tokens": sum(every) / len(every),
        "truncated": sum(cut.values()) / len(every),
    }
    for agent, own in sorted(lengths.items()):
        if agent:
            found[f"calls_per_rollout/{agent}"] = len(own) / attempts
            found[f"response_tokens/{agent}"] = sum(own) / len(own)
            found[f"truncated/{agent}"] = cut[agent] / len(own)
    return found


def _unread(formats: Mapping[str, int], answers: int) -> dict[str, float]:
    """Return the shares of answers that look like calls of which none was read; empty if there are none."""
    shares = {f"calls_unread/{name}": count / answers for name, count in sorted(formats.items()) if name != MALFORMED}
    found = {"calls_unread": sum(shares.values()), **shares} if shares else {}
    return {**found, "calls_malformed": formats[MALFORMED] / answers} if MALFORMED in formats else found


def _rates(tools: Mapping[str, int], errors: Mapping[str, int]) -> dict[str, float]:
    total = sum(tools.values())
    if not total:
        return {"tool_calls": 0.0}
    found = {"tool_calls": float(total), "tool_error_rate": sum(errors.values()) / total}
    for tool, count in sorted(tools.items()):
        found[f"tool_calls/{tool}"] = float(count)
        found[f"tool_error_rate/{tool}"] = errors[tool] / count
    return found


def of_endings(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return how many attempts ended by a fault of the infrastructure, by ending; those tried again are among them."""
    endings = (ending for outcome in outcomes for ending in outcome.endings.values())
    counts = Counter(ending.slug for ending in endings if ending.responsible == "infrastructure")
    return {f"{INFRASTRUCTURE}{slug}": float(count) for slug, count in sorted(counts.items())}


def of_versions(engines: Sequence[Engine]) -> dict[str, float]:
    """Return the number of the weights, for logs; for several policies the newest, and each under its name."""
    each = {f"policy_version/{engine.model}": float(engine.version) for engine in engines if engine.model != BASE}
    newest = {"policy_version": float(max(engine.version for engine in engines))}
    return newest if len(engines) == 1 else {**newest, **each}
