"""The policy as its own teacher: with feedback on a call, it gives the probabilities of possible answers.

SDPO, "Reinforcement Learning via Self-Distillation", arXiv 2601.20802. A message with the feedback f is added to a
call's prompt x. Given it, the same weights give another distribution over each next token of the sampled answer y,
through which no gradient flows. The minimised loss is the sum over t of KL(p(. | x, y_<t) || p(. | x, f, y_<t)). The
teacher has the newest weights, the weights that the run started from, or their average over the steps:
`SelfOptions.weights`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_trainer.backend_protocol import TeacherPolicy
from lightning_trainer.gateway.engine import tool_format
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.kits.teaching.feedback import CallKey, earnings, feedback, key_of
from lightning_trainer.kits.teaching.hints import Hints
from lightning_trainer.kits.teaching.options import PLACE
from lightning_trainer.rl.account import Untaught
from lightning_trainer.rl.algorithms.distil import FARTHEST
from lightning_trainer.rl.rows import Row, make_rows
from lightning_trainer.rl.targets import Target

if TYPE_CHECKING:
    from lightning_spans.schema.transitions import Transition
    from lightning_trainer.backend_protocol import Learner
    from lightning_trainer.kits.teaching.options import SelfOptions
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rollouts import Failed, Outcome


@dataclass(frozen=True, slots=True)
class _Segment:
    """A taught call: the place of its trained tokens among those of its row, and its row with the hint."""

    row: int
    start: int
    hinted: Row

    @property
    def end(self) -> int:
        return self.start + sum(self.hinted.lengths)


class SelfTeacher:
    """`Tutor` with the student's own weights.

    Args:
        learner: the student.
        options: what the teacher reads, and what is learned.
        alone: whether advantages are set to 0, because nothing is learned from rewards.
        failed: the reward of a rollout that failed because of the policy.

    Raises:
        ConfigError: the chat template does not allow a message before the answer, or the learner keeps only the newest
            weights and the options name others.
    """

    def __init__(self, learner: Learner, options: SelfOptions, *, alone: bool, failed: Failed) -> None:
        self._learner, self._options = learner, options
        self._teacher_logprobs = _reader(learner, options)
        self._alone, self._failed = alone, failed
        engine = learner.engine
        self._hints = Hints(ChatFormat(engine.tokenizer, tool_format(engine)), learner.end_tokens)
        self._longest = engine.max_model_len

    def teach(self, batch: Batch, outcomes: Sequence[Outcome], traces: Traces) -> tuple[Batch, dict[str, float]]:
        """Add the teacher's advantages or targets to the rows: `Tutor.teach`."""
        attempts = sorted({call.transition.attempt_id for call in batch.calls})
        told = feedback(
            batch.calls,
            traces(attempts),
            earnings(outcomes, self._failed),
            told=self._options.told,
            most=self._options.max_chars,
        )
        calls = {key_of(call.transition): call.transition for call in batch.calls}
        hinted, untaught = self._hinted_rows(batch.rows, calls, told)
        rows = [replace(row, advantages=np.zeros(len(row.tokens))) if self._alone else row for row in batch.rows]
        segments = _segments(rows, hinted)
        metrics: dict[str, float] = {}
        if segments:
            rows, metrics = (
                self._weigh_sampled_tokens(rows, segments) if not self._options.top_k else self._targets(rows, segments)
            )
        account = replace(
            batch.account,
            rows_without_gradient=sum(not row.has_gradient for row in rows),
            taught=len(segments),
            untaught=untaught,
        )
        return replace(batch, rows=rows, account=account), metrics

    def _hinted_rows(
        self, rows: Sequence[Row], calls: Mapping[CallKey, Transition], told: Mapping[CallKey, str]
    ) -> tuple[dict[CallKey, Row], Counter[str]]:
        """Return the calls' rows with the hint in their prompts, and the number of calls without one, by reason."""
        with_hint, untaught = [], Counter[str]()
        for key in (key for row in rows for key in keys_of(row)):
            found = self._with_hint(calls[key], told.get(key))
            if isinstance(found, str):
                untaught[found] += 1
            else:
                with_hint.append(found)
        groups = {row.rollout_id: row.group_id for row in rows}
        made, _ = make_rows(with_hint, np.zeros(len(with_hint)), groups, merge=False)
        return {keys_of(row)[0]: row for row in made}, untaught

    def _with_hint(self, call: Transition, told: str | None) -> Transition | str:
        """Return a call with the hint in its prompt, or the reason why it has none."""
        if told is None or call.tokens is None:
            return Untaught.NOTHING_TOLD
        prompt = self._hints.put(call.tokens.prompt, self._options.hint.replace(PLACE, told))
        if prompt is None:
            return Untaught.NO_PLACE
        if len(prompt) + len(call.tokens.response) > self._longest:
            return Untaught.HINT_TOO_LONG
        return replace(call, tokens=replace(call.tokens, prompt=tuple(prompt)))

    def _targets(self, rows: list[Row], segments: Sequence[_Segment]) -> tuple[list[Row], dict[str, float]]:
        """Give the tokens of taught calls the teacher's distribution over the policy's most probable tokens."""
        taught = sorted({segment.row for segment in segments})
        ids = dict(zip(taught, self._learner.likeliest([rows[r] for r in taught], self._options.top_k), strict=True))
        candidates = [ids[each.row][each.start : each.end] for each in segments]
        found = self._teacher_logprobs([each.hinted for each in segments], candidates)
        targets = {r: _empty(ids[r]) for r in taught}
        for each, logprobs in zip(segments, found, strict=True):
            targets[each.row].logprobs_KC[each.start : each.end] = logprobs
            targets[each.row].weights_K[each.start : each.end] = self._options.weight
        return [replace(row, target=targets.get(r)) for r, row in enumerate(rows)], {}

    def _weigh_sampled_tokens(
        self, rows: list[Row], segments: Sequence[_Segment]
    ) -> tuple[list[Row], dict[str, float]]:
        """Add log p_teacher - log p_student of the sampled tokens to the advantages of taught calls."""
        found = self._teacher_logprobs([each.hinted for each in segments], None)
        total, count = 0.0, 0
        for each, own in zip(segments, found, strict=True):
            recorded = each.hinted.logprobs[each.hinted.mask].astype(np.float64)
            gap = np.clip(own.astype(np.float64) - recorded, -FARTHEST, FARTHEST)
            row = rows[each.row]
            advantages = row.advantages.copy()
            advantages[np.flatnonzero(row.mask)[each.start : each.end]] += self._options.weight * gap
            rows[each.row] = replace(row, advantages=advantages)
            total, count = total - float(gap.sum()), count + len(gap)
        return rows, {"teacher_kl": total / count, "taught_tokens": float(count)}


def _reader(learner: Learner, options: SelfOptions) -> Callable[[Sequence[Row], Any], Sequence[NDArray[Any]]]:
    """Return a function that computes log-probabilities with the teacher's weights."""
    if options.weights == "newest":
        return learner.logprobs
    if not isinstance(learner, TeacherPolicy):
        raise ConfigError(
            f"teacher_options: weights = {options.weights}: this backend keeps no weights but the newest. Leave weights"
            " out, or set backend = torch."
        )
    return learner.teacher_logprobs


def keys_of(row: Row) -> list[CallKey]:
    """Return the keys of a row's calls, in order."""
    return [(row.attempt_id, *call) for call in row.calls]


def _segments(rows: Sequence[Row], hinted: Mapping[CallKey, Row]) -> list[_Segment]:
    found = []
    for number, row in enumerate(rows):
        starts = np.cumsum([0, *row.lengths]).tolist()
        found += [
            _Segment(number, start, hinted[key])
            for key, start in zip(keys_of(row), starts[:-1], strict=True)
            if key in hinted
        ]
    return found


def _empty(ids: NDArray[Any]) -> Target:
    shape = ids.shape
    return Target(ids.astype(np.int64), np.zeros(shape, np.float32), np.zeros(shape[0], np.float32))
