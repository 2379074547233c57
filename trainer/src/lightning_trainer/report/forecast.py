"""What a run would take and what it could learn, from a few measured rollouts. Pure: numbers in, numbers out.

Time, on this machine:

    step = r(R) + u(p(s G))
    run  = load + steps step + validations r(V)
    r(n) = (n / c) (a + b c) + j n
    u(t) = d + e t
    p(g) = h + i g

r are the seconds of n rollouts, c of them at once; R are the rollouts of a step, V those of a validation, j the seconds
of a judge for each. Rollouts are measured twice, first a single group and then as many as fit into the limit, which
gives a and b if more ran at once the second time; otherwise a is 0, and the forecast is too long if more run at once in
a step. u are the seconds of an update on t packed tokens: those of the rows, with beginnings that rows share counted
once, because the learner computes them once. It is measured on one group and on as many as fit into the limit, after a
first update, which allocates the optimiser. So d contains what does not grow with the tokens: the optimiser's step. p
are the packed tokens of g groups; h are those that all groups begin with, 0 if only one was measured. G are the groups
of a step, and s is the share of them with a signal. It grows while a policy learns and falls when it has learned: the
forecast uses the mean of the measured share and 1. With `resample`, groups without a signal are sampled again in up to
that many rounds. If a share q of the groups has a signal, R grows by the factor 1 + (1 - q) + (1 - q)^2 + ..., one term
per round, except for its forks, and s is 1 - (1 - q)^(rounds + 1). The factor uses the measured q.

GPUs, for N weights, P prompt and G generated tokens of a step, B rollouts at once, on accelerators of F = 989 TFLOP/s
in bfloat16 with 3.35 TB/s (H100 SXM), each a sum over all accelerators:

    prompts    2 N P / (0.4 F)
    answers    G max(2 N / B bandwidth, 2 N / 0.4 F) / 0.6       every step of decoding reads all weights, 2 bytes each
    update     8 N T / (0.35 F)                                  6 N, and 2 N more for gradient checkpointing
    step       their sum / 0.7 + 20 s x accelerators             stragglers; weight transfer

T are the packed tokens of all groups of a step. Memory is 16 bytes per weight (float32 master, gradient, two
moments), on as many accelerators of 80 GB as that takes, times 1.3 for activations and cache. The shares 0.4, 0.35, 0.6
and 0.7, the 20 s and the 1.3 are assumed: no run of this program on such accelerators was measured. Time on this
machine is measured; the GPU lines are order-of-magnitude estimates for planning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import decimal

_FLOPS: Final = 989e12
_BANDWIDTH: Final = 3.35e12
_MEMORY: Final = 80e9
_SIZES: Final = {"1.5B": 1.5e9, "7B": 7.6e9, "32B": 32.8e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrial:
    """One task that was tried.

    Attributes:
        place: of the task in its file, from 0.
        rewards: of its rollouts that count.
        contrast: whether an agent to train earned different rewards in them, so that there is something to learn from.
        failed: rollouts that failed.
    """

    place: int
    rewards: tuple[float, ...]
    contrast: bool
    failed: int = 0

    @property
    def mean(self) -> float | None:
        """Mean reward; None if there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class MeasuredUpdate:
    """One update that was measured.

    Attributes:
        groups: number of groups whose rows it learned from; below 1 for a part of one.
        tokens: packed tokens of these rows.
        seconds: that it took.
    """

    groups: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements.

    Attributes:
        tried: the tasks.
        rollouts: how many ran.
        rollout_seconds: that they took, including the judge if there is one.
        phases: rollouts that were queued together, and the seconds until all had ended.
        updates: the measured updates, the one on the fewest tokens first.
        tokens_prompt, tokens_generated: of all rollouts.
        tokens_in_rows: of the training rows, each counted whole.
        tokens_in_calls: of the same calls if each were a separate row.
        calls: model calls by agent.
        earned: mean reward of each agent that got its own reward.
        trained: names of the agents that would be trained.
        constant: those of them that got their own reward, and the same one in every rollout, with this reward.
        unrewarded: names of selected agents that would not be trained, because no reward is for them.
        load_seconds: until the model answered.
        memory: peak memory of this process in bytes, including the update.
        gpu_memory: peak bytes of the learner's tensors on its GPU during the update; 0 without a GPU.
    """

    tried: Sequence[TaskTrial]
    rollouts: int
    rollout_seconds: float
    tokens_prompt: int
    tokens_generated: int
    tokens_in_rows: int
    tokens_in_calls: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    earned: Mapping[str, float] = field(default_factory=dict)
    trained: Sequence[str] = ()
    unrewarded: Sequence[str] = ()
    constant: Mapping[str, float] = field(default_factory=dict)
    phases: Sequence[tuple[int, float]] = ()
    updates: Sequence[MeasuredUpdate] = ()
    load_seconds: float = 0.0
    memory: int = 0
    gpu_memory: int = 0

    @property
    def signal(self) -> float:
        """Share of tasks whose rollouts earned different rewards."""
        return sum(task.contrast for task in self.tried) / len(self.tried) if self.tried else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planned run.

    Attributes:
        step_rollouts: rollouts of a step, without those that replace others.
        forks: those of them that continue other rollouts, and are never replaced.
        resample: number of rounds in which groups without a signal are replaced.
        steps: number of steps.
        at_once: rollouts that run at the same time.
        val_rollouts: rollouts of a validation.
        validations: number of validations.
        checkpoint: bytes of one checkpoint; None: unknown.
        disk: bytes of all checkpoints that are kept at once; None: unknown.
    """

    step_rollouts: int
    steps: int
    forks: int = 0
    resample: int = 0
    at_once: int = 1
    val_rollouts: int = 0
    validations: int = 0
    checkpoint: int | None = None
    disk: int | None = None

    def rollouts(self, signal: float) -> float:
        """Return the rollouts of a step, with those that replace others, if this share of groups has a signal."""
        replaced = sum((1 - signal) ** number for number in range(1, self.resample + 1))
        return self.step_rollouts + (self.step_rollouts - self.forks) * replaced


def forecast(probe: Probe, plan: Plan) -> dict[str, Any]:
    """Return the forecast as a JSON object; see the module for its formulas."""
    scale, sampled = plan.step_rollouts / max(probe.rollouts, 1), plan.rollouts(probe.signal)
    sampled_scale, kept = sampled / max(probe.rollouts, 1), 1 - (1 - probe.signal) ** (plan.resample + 1)
    share = (kept + 1) / 2
    groups = len(probe.tried) * scale
    packed = packed_tokens(probe, groups)
    update, now, whole = (learning_seconds(probe, packed_tokens(probe, each * groups)) for each in (share, kept, 1.0))
    rollouts, validation = (sampling_seconds(probe, n, plan.at_once) for n in (sampled, plan.val_rollouts))
    step = rollouts + update
    means = [task.mean for task in probe.tried if task.mean is not None]
    best = [max(task.rewards) for task in probe.tried if task.rewards]
    return {
        "verdict": verdict(probe.tried),
        "signal": round(probe.signal, 4),
        "signal_step": round(kept, 4),
        "rollouts_step": round(sampled),
        "resample": plan.resample,
        "reward": round(sum(means) / len(means), 4) if means else None,
        "reward_best_of_k": round(sum(best) / len(best), 4) if best else None,
        "samples": max((len(task.rewards) for task in probe.tried), default=0),
        "tasks_tried": len(probe.tried),
        "rollouts_tried": probe.rollouts,
        "agents": {
            name: {
                "calls": count,
                "reward": probe.earned.get(name),
                "constant": name in probe.constant,
                "trained": name in probe.trained,
                "unrewarded": name in probe.unrewarded,
            }
            for name, count in probe.calls.items()
        },
        "rows_tokens_step": round(probe.tokens_in_rows * scale),
        "packed_tokens_step": round(packed),
        "call_tokens_step": round(probe.tokens_in_calls * scale),
        "learned_share": round(share, 4),
        "validation_steps": round(plan.validations * plan.val_rollouts / max(sampled, 1), 4),
        "tokens_prompt_step": round(probe.tokens_prompt * sampled_scale),
        "tokens_generated_step": round(probe.tokens_generated * sampled_scale),
        "seconds_step": round(step, 1),
        "seconds_rollouts": round(rollouts, 1),
        "seconds_update": round(update, 1),
        "seconds_update_now": round(now, 1),
        "seconds_update_all": round(whole, 1),
        "measured_at_once": min(max((count for count, _ in probe.phases), default=probe.rollouts), plan.at_once),
        "step_at_once": min(plan.step_rollouts, plan.at_once),
        "measured_update_tokens": max((update.tokens for update in probe.updates), default=0),
        "seconds_run": round(probe.load_seconds + plan.steps * step + plan.validations * validation, 1),
        "steps": plan.steps,
        "memory_bytes": probe.memory,
        "gpu_memory_bytes": probe.gpu_memory,
        "checkpoint_bytes": plan.checkpoint,
        "disk_bytes": plan.disk,
        "gpu": {name: _gpu(size, probe, plan, packed) for name, size in _SIZES.items()},
    }


def sampling_seconds(probe: Probe, count: float, at_once: int) -> float:
    """Return the seconds that so many rollouts take, `at_once` of them at the same time: r(n) of the module."""
    if not count or not probe.rollouts:
        return 0.0
    phases = [phase for phase in probe.phases if phase[0]] or [(probe.rollouts, probe.rollout_seconds)]
    judge = (probe.rollout_seconds - sum(seconds for _, seconds in phases)) / probe.rollouts
    (first, seconds), most = phases[0], max(number for number, _ in phases)
    largest = [phase for phase in phases if phase[0] == most]
    each = sum(longer for _, longer in largest) / (most * len(largest))
    few, many, slots = (min(number, at_once) for number in (first, most, count))
    if many > few:
        short, long = seconds * few / first, each * many  # in which every slot ends one rollout: a + b c
        slope = min(max((long - short) / (many - few), 0.0), long / many)
        each = (long + slope * (slots - many)) / slots
    return count * (each + judge)


def packed_tokens(probe: Probe, groups: float) -> float:
    """Return the packed tokens of so many groups: p(g) of the module. Those of the rows if no update was measured."""
    if not probe.updates:
        return probe.tokens_in_rows * groups / max(len(probe.tried), 1)
    few, many = probe.updates[0], probe.updates[-1]
    each = many.tokens / many.groups
    if few.groups >= 1 and many.groups > few.groups:
        each = min((many.tokens - few.tokens) / (many.groups - few.groups), each)
    return many.tokens + each * (groups - many.groups)


def learning_seconds(probe: Probe, tokens: float) -> float:
    """Return the seconds of an update on so many packed tokens: u(t) of the module."""
    if not probe.updates:
        return 0.0
    few, many = probe.updates[0], probe.updates[-1]
    each = many.seconds / max(many.tokens, 1)
    if many.tokens > few.tokens:
        each = min(max((many.seconds - few.seconds) / (many.tokens - few.tokens), 0.0), each)
    return many.seconds + each * (tokens - many.tokens)


def verdict(tried: Sequence[TaskTrial]) -> str:
    """Return in a sentence whether reinforcement learning has anything to learn here."""
    counted = [task for task in tried if task.rewards]
    if not counted:
        return "no rollout has a reward. `lightning-rl agents` shows what failed"
    signal = sum(task.contrast for task in counted)
    if signal:
        has, what = ("has", "it") if signal == 1 else ("have", "them")
        return f"{signal} of {amount(len(counted), 'tried task')} {has} a signal: RL can learn from {what}"
    rewards = [reward for task in counted for reward in task.rewards]
    if max(rewards) <= 0:
        ran = f"no rollout earned a reward above 0 ({len(rewards)} ran)"
        return f"{ran}. Run SFT first, or use easier tasks or a finer reward"
    if min(rewards) >= 1:
        return f"solved already: all {amount(len(rewards), 'rollout')} earned the full reward. Use harder tasks"
    alike = all(min(task.rewards) == max(task.rewards) for task in counted)
    who = "all rollouts earn the same" if alike else "each trained agent earns the same in all rollouts"
    return f"no signal: in each task {who}. Use more samples, a higher temperature, or a reward with more values"


def _gpu(size: float, probe: Probe, plan: Plan, packed: float) -> dict[str, float]:
    scale = plan.rollouts(probe.signal) / max(probe.rollouts, 1)
    prompts, answers = probe.tokens_prompt * scale, probe.tokens_generated * scale
    at_once = max(1, min(256, plan.step_rollouts))
    decode = max(2 * size / (at_once * _BANDWIDTH), 2 * size / (0.4 * _FLOPS)) / 0.6
    update = 8 * size * packed / (0.35 * _FLOPS)
    gpus = 2 ** math.ceil(math.log2(max(1.0, 16 * size * 1.3 / _MEMORY)))
    seconds = (2 * size * prompts / (0.4 * _FLOPS) + answers * decode + update) / 0.7 + 20 * gpus
    return {
        "gpus": gpus,
        "memory_gb": round(16 * size * 1.3 / 1e9),
        "gpu_hours_step": round(seconds / 3600, 4),
        "gpu_hours_run": round(seconds * plan.steps / 3600, 2),
    }


def lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a forecast as lines of text."""
    found = [str(facts["verdict"])]
    if facts["reward"] is not None:
        found.append(
            f"reward: mean {decimal(facts['reward'])}, best of {facts['samples']} rollouts"
            f" {decimal(facts['reward_best_of_k'])} ({amount(facts['tasks_tried'], 'task')} tried)"
        )
    for name, agent in facts["agents"].items():
        always = f" in all {facts['rollouts_tried']} rollouts: no signal so far" if agent["constant"] else ""
        earned = "" if agent["reward"] is None else f"reward {decimal(agent['reward'])}{always}, "
        refused = "would not be trained: no reward. Give it one" if agent["unrewarded"] else "not trained"
        trained = "would be trained" if agent["trained"] else refused
        found.append(f"{name}: {amount(agent['calls'], 'call')}, {earned}{trained}")
    times = f"{facts['seconds_rollouts']:.1f} s of rollouts, {facts['seconds_update']:.1f} s of learning"
    read, written = facts["tokens_prompt_step"], facts["tokens_generated_step"]
    rests = f"{amount(facts['rollouts_tried'], 'rollout')}, {facts['measured_at_once']} at once"
    if facts["measured_at_once"] < facts["step_at_once"]:
        rests += f" (in a step {facts['step_at_once']}, so a step may be faster)"
    if facts["measured_update_tokens"]:
        rests += f", and an update on {facts['measured_update_tokens']:,} packed tokens"
    found += [
        f"time per step: {facts['seconds_step']:.1f} s ({times})",
        *_resampling_lines(facts),
        *_learning_lines(facts),
        f"  measured: {rests}",
        (
            f"  {read:,} prompt tokens, {written:,} generated, {facts['rows_tokens_step']:,} in training rows,"
            f" {facts['packed_tokens_step']:,} packed"
        ),
        f"time of the run: {_duration(facts['seconds_run'])} on this machine, {amount(facts['steps'], 'step')}",
        f"memory: {facts['memory_bytes'] / 1e9:.1f} GB in this process (measured), plus the worker processes",
    ]
    if facts["gpu_memory_bytes"]:
        found.append(f"GPU memory: {facts['gpu_memory_bytes'] / 1e9:.1f} GB for the learner's tensors (measured)")
    if facts["disk_bytes"] is not None:
        found += disk_lines(facts["checkpoint_bytes"], facts["disk_bytes"])
    found.append("the same run on GPUs (H100, 80 GB), estimated from assumed efficiencies:")
    for name, gpu in facts["gpu"].items():
        count = f"{gpu['gpus']} GPU{'s' if gpu['gpus'] > 1 else ''}"
        found.append(f"  {name:>5}: {count}, {gpu['memory_gb']} GB, {_gpu_hours(gpu['gpu_hours_run'])}")
    return found


def _resampling_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return how many rollouts a step has with those that replace groups without a signal."""
    if not facts["resample"] or facts["signal"] == 1:
        return []
    now = f"resample = {facts['resample']}, {facts['signal']:.0%} of the groups have a signal, as now"
    return [f"  {facts['rollouts_step']} rollouts per step, with those that replace groups without a signal ({now})"]


def _learning_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return how the time of learning depends on the share of groups with a signal, which changes during a run."""
    now, whole = facts["seconds_update_now"], facts["seconds_update_all"]
    if facts["signal_step"] == 1 or not whole:
        return []
    share = f"{facts['signal_step']:.0%} of the groups"
    return [f"  learning: {now:.1f} s with a signal in {share}, as now; {whole:.1f} s in all"]


def disk_lines(checkpoint: int, disk: int) -> list[str]:
    """Return what a run's checkpoints take, as a line of text."""
    return [f"disk: {disk / 1e9:.2f} GB at most, {checkpoint / 1e9:.2f} GB per checkpoint"]


def _gpu_hours(hours: float) -> str:
    return "less than 0.1 GPU-hours" if hours < 0.1 else f"{hours:.1f} GPU-hours"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes > 90:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes:.0f} minutes" if minutes > 3 else f"{seconds:.0f} s"
