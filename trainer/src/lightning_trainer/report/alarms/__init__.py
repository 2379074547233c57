"""Alarms: plain sentences about what a run's numbers show if something goes wrong. Pure functions of its history.

Each check gets the lines of the run so far and yields sentences, or nothing. It is called after every line, so it takes
numbers from `History.series`, which reads each line once. They compare the last steps with the
first ones, so they are silent in a run's first steps. What a learning policy also does (it becomes more certain, its
answers become shorter) raises no alarm while the reward rises.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

from lightning_trainer import registry
from lightning_trainer.reasons.continuation import OTHER
from lightning_trainer.report.history import History, Points

logger = logging.getLogger(__name__)

MOST_GAP: Final = 0.1  # between `reward` and `reward_all`
_ALIKE: Final = 0.8  # share of different prompts that get the same answer
_UNREAD: Final = 5  # answers in the last steps: fewer are chance
_ONE: Final = 0.97  # what such an agent gives when it no longer decides
_FEW: Final = 0.4  # the same share of an agent that has few answers, such as yes and no
WINDOW: Final = 3  # steps that are averaged at either end


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that a person should look at.

    Attributes:
        name: its name, followed by ``/NAME`` for one policy of several.
        step: steps taken when it was raised.
        text: what is wrong and what to do, in a sentence or two.
    """

    name: str
    step: int
    text: str


def active_alarms(history: History) -> list[Alarm]:
    """Return the alarms that are active after the newest line. A check that fails is logged, and raises none."""
    found = []
    for name, check in registry.registrations("alarm").items():
        try:
            found += [Alarm(f"{name}{of}", history.steps, text) for of, text in check(history)]
        except Exception:
            logger.exception("the alarm %s failed, so it is not raised", name)
    return found


Found: TypeAlias = Iterator[tuple[str, str]]  # ("" or /POLICY, the sentence)


def entropy_collapsed(history: History) -> Found:
    """Yield an alarm if the policy has stopped exploring and has not improved."""
    for of, points in _each(history, "entropy"):
        first, now = ends(points)
        if now < 0.1 * first and not has_learned(history):
            text = (
                f"The entropy{_of(of)} has fallen from {first:.2f} to {now:.3f} nats a token, and the reward has"
                f" not risen{_rewards(history)}: its answers are nearly always the same. Lower --learning-rate, raise"
                " --clip-high,"
                " or start from an earlier checkpoint."
            )
            yield of, text


def length_collapsed(history: History) -> Found:
    """Yield an alarm if answers have become several times shorter or longer, and the reward has not risen."""
    for of, points in _each(history, "response_tokens"):
        first, now = ends(points)
        if not (now < 0.3 * first or now > 3 * first) or has_learned(history):
            continue
        how = "shrunk" if now < first else "grown"
        text = (
            f"Answers{_of(of)} have {how} from {first:.0f} to {now:.0f} tokens, and the reward has not"
            f" risen{_rewards(history)}. Look at some with lightning-rl traces: does the reward pay for length?"
        )
        yield of, text


def answers_cut(history: History) -> Found:
    """Yield an alarm if most answers reach their limit, and did not at first."""
    for of, points in _each(history, "truncated"):
        first, now = ends(points)
        if now >= 0.5 and now >= first + 0.25:
            text = (
                f"{now:.0%} of the answers{_of(of)} are cut at their limit, {first:.0%} were at first. Raise"
                " --max-tokens or the limit in the agent's requests, or reward long answers less."
            )
            yield of, text


def rollouts_left_out(history: History) -> Found:
    """Yield an alarm if the mean reward would be different if the rollouts that do not count had earned 0."""
    for kind in ("train", "val"):
        newest = next((line for line in reversed(history.of_kind(kind)) if _has_both(line)), None)
        if newest is not None and abs(newest["reward"] - newest["reward_all"]) > MOST_GAP:
            reward, reward_all = newest["reward"], newest["reward_all"]
            what = "The reward" if kind == "train" else "The held-out reward"
            text = (
                f"{what} is {reward:.2f} over the rollouts that count, and {reward_all:.2f} if those that were left out"
                " had earned 0. Look at why they were left out, in the log and in the viewer, before you trust either."
            )
            yield "" if kind == "train" else "/val", text


def _has_both(line: Mapping[str, Any]) -> bool:
    return line.get("reward") is not None and line.get("reward_all") is not None


def groups_dead(history: History) -> Found:
    """Yield an alarm if hardly any group has two different rewards, so that hardly anything is learned."""
    points = history.series("train", "groups_without_signal")
    newest = [value for _, value in points[-WINDOW:]]
    distilled = sum(value for _, value in history.series("train", "distilled_calls")[-WINDOW:])  # with_prompts
    if len(newest) == WINDOW and min(newest) >= 0.8 and not distilled:
        rewards = [value for _, value in history.series("train", "reward")[-WINDOW:]]
        mean = f", at a mean of {statistics.fmean(rewards):.2f}" if rewards else ""
        text = (
            f"In the last {WINDOW} steps {statistics.fmean(newest):.0%} of the groups had equal rewards"
            f" throughout{mean}, "
            "so nothing was learned from them. If the reward is high enough, stop here. Otherwise use tasks that the"
            " agent solves sometimes, a larger --group-size, or a reward with more values."
        )
        yield "", text


def held_out_falls(history: History) -> Found:
    """Yield an alarm if the held-out reward is significantly below its best, and the training reward still rises."""
    held_out = history.series("val", "reward")
    if len(held_out) < 3:
        return
    best_step, best = max(held_out[:-2], key=lambda point: point[1])
    if any(value > best - 0.1 * abs(best) for _, value in held_out[-2:]):
        return
    if history.has_tasks:
        if history.fall() is None:
            return
    elif any(high >= best for step, high in history.series("val", "reward_high") if step >= held_out[-2][0]):
        return
    train = history.series("train", "reward")
    then = [value for step, value in train if abs(step - best_step) < WINDOW]
    now = [value for _, value in train[-WINDOW:]]
    if then and len(now) == WINDOW and statistics.fmean(now) > statistics.fmean(then):
        text = (
            f"The held-out reward has fallen from {best:.2f} after {best_step} steps to {held_out[-1][1]:.2f},"
            f" while the training reward rose from {statistics.fmean(then):.2f} to {statistics.fmean(now):.2f}: the"
            " policy memorises the training tasks (overfitting). Use the best checkpoint, or train on more tasks."
        )
        yield "", text


def answers_alike(history: History) -> Found:
    """Yield an alarm if an agent gives the same answer to nearly all prompts, and did not at first."""
    for name in history.names("answers_alike"):
        of = name.removeprefix("answers_alike")
        held_out, training = (history.series(kind, f"answers_alike{of}") for kind in ("val", "train"))
        sides = [(held_out[0][1], held_out[-1][1])] if len(held_out) > 1 else []
        if len(training) > WINDOW:
            sides.append((training[0][1], statistics.fmean(value for _, value in training[-WINDOW:])))
        collapsed = [(first, now) for first, now in sides if now > _ALIKE >= first]
        # An agent with few answers, such as a checker of queries that get better, may be right to give one more often.
        if all(first > _FEW and (now < _ONE or _better(history)) for first, now in collapsed):
            continue
        if not collapsed:
            continue
        first, now = collapsed[0]
        agent = of.removeprefix("/")
        frequent = next((line for line in reversed(history) if line.get("most_frequent")), None)
        answer, share = frequent["most_frequent"].get(agent, ("", 0.0)) if frequent is not None else ("", 0.0)
        quoted = f"the answer {answer!r}" if answer and share > 0.5 else "one answer"  # also an empty or a long one
        text = (
            f"{agent or 'The agent'} gives {quoted} to {now:.0%} of the"
            f" different prompts, {first:.0%} at first. Look at some with lightning-rl traces. Use an earlier"
            " checkpoint, a lower --learning-rate, or tasks and a reward for which one answer does not pay."
        )
        yield of, text


def engine_gap_widens(history: History) -> Found:
    """Yield an alarm if the engine's log-probabilities diverge from the trainer's: other weights or another sampler."""
    for of, points in _each(history, "engine_gap" if history.names("engine_gap/") else "logprob_gap", least=1):
        if of.count("/") > 1:  # for some tokens only
            continue
        newest = points[-1][1]
        first, now = ends(points) if len(points) >= 2 * WINDOW else (math.inf, newest)
        if newest > 0.5:
            text = (
                f"The engine's log-probabilities{_of(of)} differ from the trainer's by {newest:.2f} nats a token:"
                " it does not sample from the weights that are trained. Stop, and report what lightning-rl doctor"
                " says."
            )
            yield of, text
        elif now > 3 * first and now > 0.05:
            text = (
                f"The gap between the engine's log-probabilities and the trainer's{_of(of)} has widened from"
                f" {first:.3f} to {now:.3f} nats a token. Updates are off by that much: lower --learning-rate, or"
                " compute in float32 with --dtype."
            )
            yield of, text


def tools_fail(history: History) -> Found:
    """Yield an alarm if tools fail much more often than at first."""
    for of, points in _each(history, "tool_error_rate"):
        first, now = ends(points)
        if now >= 0.5 and now >= first + 0.3:
            text = (
                f"{now:.0%} of the tool calls{_of(of)} fail, {first:.0%} did at first. See why with lightning-rl"
                " traces: a tool that is down teaches agents not to use it."
            )
            yield of, text


def calls_unread(history: History) -> Found:
    """Yield an alarm if answers look like tool calls in another format: no tool is called, and no error reports it."""
    for of, points in _each(history, "calls_unread", least=1):
        step, share = points[-1]
        seen = dict(history.series("train", "calls_seen"))
        if step < _newest(history) or sum(seen.get(at, math.inf) * its for at, its in points[-WINDOW:]) < _UNREAD:
            continue
        share = statistics.fmean(its for _, its in points[-WINDOW:])
        form = of.removeprefix("/")
        if form == OTHER and share >= 0.1:  # a smaller share is normal before a model has learned the format
            text = (
                f"{share:.0%} of the answers contain a tool's name and arguments in a format that is not recognised,"
                " so they reached the agent as text. See some with lightning-rl traces. A model that always writes like"
                " this must first learn the format: lightning-rl sft."
            )
            yield of, text
        elif form != OTHER and share >= 0.02:
            text = (
                f"{share:.0%} of the answers look like tool calls in the format {form or 'of another model'}, and none"
                " was read from them: they reached the agent as text. If the model was trained on that format, start"
                f" with --tool-format {form or 'NAME'}."
            )
            yield of, text


def calls_malformed(history: History) -> Found:
    """Yield an alarm if the share of malformed tool calls, which are not executed, does not fall."""
    for of, points in _each(history, "calls_malformed", least=4 * WINDOW):
        first, now = ends(points)
        if now >= 0.25 and now >= 0.8 * first and points[-1][0] == _newest(history):
            text = (
                f"{now:.0%} of the answers are malformed tool calls, {first:.0%} were at first: they reached"
                " the agent as text. Show the model how calls are written first, with lightning-rl sft, "
                "or sample with a lower --temperature."
            )
            yield of, text


def _newest(history: History) -> int:
    steps = history.of_kind("train")
    return int(steps[-1]["step"]) if steps else 0


def rollouts_fail(history: History) -> Found:
    """Yield an alarm if far more rollouts fail than at first, even if the reward rises: that of the others may."""
    failed = dict(history.series("train", "failed"))
    points = [(step, failed[step] / of) for step, of in history.series("train", "rollouts") if of and step in failed]
    if len(points) < 2 * WINDOW:
        return
    first, now = ends(points)
    usual = statistics.median(abs(b - a) for (_, a), (_, b) in pairwise(points))
    if now >= 0.1 and now >= first + max(0.1, 3 * usual) and now >= 1.5 * first:
        text = (
            f"{now:.0%} of the rollouts fail, {first:.0%} did at first. See why with lightning-rl traces and the"
            " workers' logs. If the agent raises an exception because of the policy's answer, --failed sets the reward"
            " (0, or the"
            " lowest of the batch, by default): with --failed exclude policies learn to crash."
        )
        yield "", text


def rules_fail(history: History) -> Found:
    """Yield an alarm if an automatic reward rule failed on attempts, which got nothing from it, not even penalties."""
    for of, points in _each(history, "rule_failures", least=1):
        if points[-1][0] == _newest(history):
            text = (
                f"The rule {of.removeprefix('/')} failed on {points[-1][1]:.0f} attempts of the last step, so it gave"
                " them neither rewards nor penalties. The log has the traceback: "
                "fix the rule, or leave it out of [rewards]."
            )
            yield of, text


CHECKS: Final[tuple[Callable[[History], Found], ...]] = (
    entropy_collapsed,
    length_collapsed,
    answers_cut,
    rollouts_left_out,
    groups_dead,
    held_out_falls,
    answers_alike,
    engine_gap_widens,
    tools_fail,
    calls_unread,
    calls_malformed,
    rollouts_fail,
    rules_fail,
)


def series(history: History, kind: str, name: str) -> Points:
    """Return (step, value) for every line of a kind in which this number is finite; for alarms of plugins."""
    return history.series(kind, name)


def ends(points: Points) -> tuple[float, float]:
    """Return the means of the first and the last `WINDOW` values."""
    first, last = points[:WINDOW], points[-WINDOW:]
    return statistics.fmean(value for _, value in first), statistics.fmean(value for _, value in last)


def has_learned(history: History) -> bool:
    """Whether the training reward has risen by more than its usual change from step to step."""
    points = history.series("train", "reward")
    if len(points) < 2 * WINDOW:
        return True
    first, now = ends(points)
    jumps = [abs(b - a) for (_, a), (_, b) in pairwise(points)]
    return now - first > 1.5 * statistics.median(jumps)


def _better(history: History) -> bool:
    """Whether the newest reward is higher than the first: held out if there is one, otherwise in training."""
    held_out = history.series("val", "reward")
    return held_out[-1][1] > held_out[0][1] if len(held_out) > 1 else has_learned(history)


def _each(history: History, name: str, *, least: int = 2 * WINDOW) -> Iterator[tuple[str, Points]]:
    """Yield a number's points, for each policy or tool if they are separate; series that are too short are left out."""
    for each in history.names(f"{name}/") or [name]:
        points = history.series("train", each)
        if len(points) >= least:
            yield each.removeprefix(name), points


def _of(of: str) -> str:
    return f" of {of.removeprefix('/')}" if of else ""


def _rewards(history: History) -> str:
    points = history.series("train", "reward")
    return f" ({ends(points)[0]:.2f}, now {ends(points)[1]:.2f})" if points else ""
