"""Where the time of a step goes: what it waited for, and a sentence on what to change. Pure: numbers in, text out.

While a step waits for its rollouts, each running attempt is either inside a model call or in the program's own code. At
each moment the waiting time is divided in these proportions: with 3 of 4 attempts in a call, 75 % is sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from lightning_trainer.report.log.lines import WAITED_FOR

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.rollouts import Outcome

STEPS_BEFORE_ADVICE: Final = 5  # the first is left out, because it loads and warms up
_NAMES: Final = {
    "sampling": "sampling",
    "program": "the program outside of model calls",
    "learner": "the update",
    "weights": "sending weights to the engine",
    "other": "everything except rollouts and update",
}

Window = tuple[int, int]
"""Beginning and end in Unix nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTime:
    """Seconds of waiting for rollouts.

    Attributes:
        sampling: within model calls that the gateway answered.
        program: in the program's own code, including calls to its own endpoints.
        sampled: in which at least one call was in progress, whether the step waited or not.
    """

    sampling: float
    program: float
    sampled: float


def time_rollouts(outcomes: Iterable[Outcome], traces: Iterable[Trace], windows: Sequence[Window]) -> RolloutTime:
    """Divide the time that a step waited for its rollouts.

    Time in which none of their attempts ran is in neither part.

    Args:
        outcomes: of the rollouts.
        traces: of their attempts.
        windows: in which the step waited.
    """
    attempts = [(a.started_ns, a.ended_ns) for o in outcomes for a in o.attempts if a.ended_ns is not None]
    calls = [(n.call.start_ns, n.call.end_ns) for trace in traces for n in trace.chats if n.call is not None]
    sampling = program = 0.0
    for window in windows:
        for seconds, running, calling in _moments(attempts, calls, window):
            share = min(1.0, calling / running) if running else 0.0
            sampling += seconds * share
            program += seconds * (1.0 - share) if running else 0.0
    always = (min((begin for begin, _ in calls), default=0), max((end for _, end in calls), default=0))
    sampled = sum(seconds for seconds, _, calling in _moments((), calls, always) if calling)
    return RolloutTime(sampling=sampling, program=program, sampled=sampled)


def _moments(attempts: Iterable[Window], calls: Iterable[Window], window: Window) -> Iterator[tuple[float, int, int]]:
    """Yield the intervals of a window between two changes: seconds, running attempts, calls in progress."""
    changes: list[tuple[int, int, int]] = [(window[0], 0, 0), (window[1], 0, 0)]
    for spans, attempt, call in ((attempts, 1, 0), (calls, 0, 1)):
        for first, last in spans:
            begin, end = max(first, window[0]), min(last, window[1])
            if begin < end:
                changes += [(begin, attempt, call), (end, -attempt, -call)]
    running = calling = 0
    for (now, attempt, call), (then, _, _) in pairwise(sorted(changes)):
        running, calling = running + attempt, calling + call
        if then > now:
            yield (then - now) / 1e9, running, calling


def divide_step(rolled: RolloutTime, metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide the seconds of a step by what it waited for.

    Args:
        rolled: of its rollouts.
        metrics: of the step: `seconds`, and if they exist `update_seconds`, which include `weights_seconds`, and
            `tokens_generated`.

    Returns:
        ``waited_for/PART`` in seconds, which add up to `seconds`, and ``tokens_per_second`` of sampling.
    """
    weights = metrics.get("weights_seconds", 0.0)
    parts = {
        "sampling": rolled.sampling,
        "program": rolled.program,
        "learner": max(0.0, metrics.get("update_seconds", 0.0) - weights),
        "weights": weights,
    }
    parts["other"] = max(0.0, metrics["seconds"] - sum(parts.values()))
    found = {f"{WAITED_FOR}/{part}": seconds for part, seconds in parts.items()}
    if rolled.sampled:
        found["tokens_per_second"] = metrics.get("tokens_generated", 0.0) / rolled.sampled
    return found


def longest_wait(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return what a step waited for longest, and the seconds; None if that is not known."""
    parts = {part: metrics[name] for part in _NAMES if (name := f"{WAITED_FOR}/{part}") in metrics}
    return max(parts.items(), key=lambda item: item[1]) if parts else None


def name_bottleneck(steps: Sequence[Mapping[str, Any]], config: TrainConfig, *, samples_apart: bool) -> str | None:
    """Return a sentence on where most of the time goes, and which option to change.

    Args:
        steps: metrics of the steps since the run started or was resumed.
        config: of the run.
        samples_apart: whether the engine samples while the learner learns.

    Returns:
        The sentence after the fifth step; None after every other.
    """
    known = [step for step in steps[1:] if longest_wait(step)] if len(steps) == STEPS_BEFORE_ADVICE else []
    whole = sum(step["seconds"] for step in known)
    if not whole:
        return None
    shares = {part: sum(step[f"{WAITED_FOR}/{part}"] for step in known) / whole for part in _NAMES}
    part = max(shares, key=lambda name: shares[name])
    advice = _advice(part, config, samples_apart=samples_apart)
    return f"Bottleneck: {_NAMES[part]} takes {shares[part]:.0%} of a step of {whole / len(known):.1f} s. {advice}"


def _advice(part: str, config: TrainConfig, *, samples_apart: bool) -> str:
    ours, at_once, adapters = config.backend == "torch", config.concurrency, config.lora_rank > 0
    newest = config.uses_forks or config.by_coalitions or config.teacher is not None or config.resample > 0
    changing = config.schedule is not None or bool(config.opponents) or config.task_order == "curriculum"
    early = config.backend in ("torch", "tinker", "verl") and not newest and not changing  # the others reject staleness
    cluster = config.backend == "verl" and config.device != "cpu"
    overlap = f"--staleness {config.staleness + 1}"
    overlaps = early and samples_apart and not config.staleness  # then sampling during the update saves time
    vllm = ours and samples_apart and config.engine_url is None
    table = (
        ("sampling", overlaps and vllm, f"Sample during the update with {overlap}, or use --engine-gpus for vLLM."),
        ("sampling", overlaps, f"Sample during the update with {overlap}."),
        ("sampling", vllm, "Give vLLM a GPU with --engine-gpus, or lower --max-tokens or --group-size."),
        ("sampling", ours and not samples_apart, "On a GPU, use --engine vllm; otherwise lower --max-tokens."),
        ("sampling", cluster, f"Use more GPUs than --gpus {config.gpus}, or lower --max-tokens or --group-size."),
        ("sampling", True, "Lower --max-tokens or --group-size."),
        ("program", early, f"Start the next step's rollouts early with {overlap}, or raise --concurrency ({at_once})."),
        ("program", True, f"Raise --concurrency ({at_once})."),
        ("learner", overlaps, f"Sample during the update with {overlap}."),
        ("learner", ours and not adapters, "Train adapters with --lora-rank 16, or use a GPU."),
        ("learner", ours, "Use a GPU, or lower --group-size."),
        ("learner", cluster, f"Use more GPUs than --gpus {config.gpus}, or lower --group-size."),
        ("learner", True, "Lower --group-size."),
        ("weights", not adapters, "Train adapters with --lora-rank 16: they are a few megabytes."),
        ("weights", True, "Lower --lora-rank."),
        ("other", True, "Compare adapt_seconds, teacher_seconds and fork_seconds in metrics.jsonl."),
    )
    return next(text for name, fits, text in table if name == part and fits)
