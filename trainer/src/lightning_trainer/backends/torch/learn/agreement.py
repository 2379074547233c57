"""Whether engine and learner agree: after each update on some of its rows, and in each step on all sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.engines.contract import EngineError, PolicyEngines
from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.rl.delivery import correlation, delivery
from lightning_trainer.rl.rows import UNKNOWN_VERSION, Row

_TOKENS: Final = 256  # enough to distinguish an update from rounding
_ROWS: Final = 8
_TEXT: Final = "Rome is the capital of Italy. 12 + 7 = 19. The agent called the tool twice, then it answered: yes."
_TEXT_TOKENS: Final = 48  # at most, which every context holds
_OTHER_GAP: Final = 0.5  # nats per token; rounding to bfloat16 makes 0.03
_OTHER_CORRELATION: Final = 0.9  # rounding leaves 0.99
_DEPTHS: Final = (0, 256, 1024, 4096, 16384)  # numbers of tokens before a token at which gaps are split


ReadRows: TypeAlias = Callable[[Sequence[Row]], Sequence[NDArray[Any]]]
"""Returns the learner's log-probabilities of the trained tokens of each row."""


def check_model(engine: PolicyEngines, policy: str, tokenizer: Any, read: ReadRows) -> None:
    """Compare an engine with the learner on a text before the first step.

    Raises:
        EngineError: the engine serves another model, or computes it differently.
    """
    tokens_T = np.asarray(tokenizer.encode(_TEXT)[:_TEXT_TOKENS], np.int32)
    told = engine.logprobs(policy, [int(token) for token in tokens_T]) if len(tokens_T) > 1 else None
    if told is None:
        return
    mask_T, zeros_T = np.arange(len(tokens_T)) > 0, np.zeros(len(tokens_T))
    row = Row(
        tokens=tokens_T, mask=mask_T, logprobs=zeros_T.astype(np.float32), advantages=zeros_T,
        lengths=(int(mask_T.sum()),), agent="", attempt_id="", rollout_id="", group_id="", policy=policy,
    )  # fmt: skip
    own_K, engine_K = next(iter(read([row]))).astype(np.float64), np.asarray(told, np.float64)
    gap, same = float(np.abs(own_K - engine_K).mean()), correlation(own_K, engine_K)
    if gap > _OTHER_GAP or same < _OTHER_CORRELATION:
        raise EngineError(
            f"the engine does not serve the learner's model: on the same text, its log-probabilities for {policy} are"
            f" {gap:.2f} nats per token away, with a correlation of {same:.2f} instead of 1. Start the server with the"
            " folder of --model, or use --engine embedded."
        )


@dataclass(frozen=True, slots=True)
class DeliveryCheck:
    """The learner's log-probabilities of some rows before an update.

    Attributes:
        policy: that sampled the rows.
        rows: at temperature 1, as the engine computes them.
        before: for each row (K,) log-probabilities of its trained tokens.
    """

    policy: str
    rows: tuple[Row, ...]
    before: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, policy: str, rows: Sequence[Row], read: ReadRows) -> DeliveryCheck:
        """Read the shortest rows of a policy that have enough tokens together."""
        chosen: list[Row] = []
        for row in sorted((row for row in rows if row.mask.any()), key=lambda row: len(row.tokens))[:_ROWS]:
            chosen.append(replace(row, temperature=1.0))
            if sum(int(each.mask.sum()) for each in chosen) >= _TOKENS:
                break
        return cls(policy, tuple(chosen), tuple(read(chosen)))

    def confirm(self, engine: PolicyEngines, read: ReadRows) -> None:
        """Compare the engine with the learner after the update.

        Raises:
            EngineError: the engine still samples from the weights before the update; names the policy and its agents.
        """
        if not self.rows:
            return
        told = []
        for row in self.rows:
            logprobs = engine.logprobs(self.policy, [int(token) for token in row.tokens])
            if logprobs is None:
                return
            told.append(np.asarray(logprobs, np.float64)[row.mask[1:]])
        found = delivery(np.concatenate(self.before), np.concatenate(read(self.rows)), np.concatenate(told))
        if found.missing:
            agents = ", ".join(sorted({row.agent for row in self.rows}))
            raise EngineError(
                f"the engine does not sample from the new weights of {self.policy} (agent {agents}). It accepted the"
                f" adapter, but its log-probabilities show {found.share:.2f} of the update (standard error"
                f" {found.error:.2g}) instead of 1. Try another version of the engine, or --engine embedded."
            )


def engine_gaps(
    parts: Mapping[str, Sequence[Row]], seen: Mapping[Row, SeenTokens], versions: Mapping[str, int]
) -> dict[str, float]:
    """Return how engine and learner differ on each policy's sampled tokens, in rows that its newest weights sampled.

    Args:
        parts: rows by policy.
        seen: the learner's view of them.
        versions: number of each policy's weights before the update.

    Returns:
        ``engine_gap/POLICY`` (mean absolute difference in nats per token), ``engine_correlation/POLICY``, and
            ``engine_gap/POLICY/DEPTH`` for tokens with at least so many before them, if there are several depths.
    """
    found: dict[str, float] = {}
    for policy, rows in parts.items():
        known = [row for row in rows if row in seen and not _is_older(row, versions[policy])]
        if not known:
            continue
        recorded_K = np.concatenate([row.logprobs[row.mask] for row in known]).astype(np.float64)
        gap_K = np.concatenate([seen[row].gap for row in known]).astype(np.float64)
        depth_K = np.concatenate([np.flatnonzero(row.mask) for row in known])
        found[f"engine_gap/{policy}"] = float(np.abs(gap_K).mean())
        found[f"engine_correlation/{policy}"] = correlation(recorded_K, recorded_K + gap_K)
        found |= {f"engine_gap/{policy}/{depth}": gap for depth, gap in _by_depth(np.abs(gap_K), depth_K)}
    return found


def without_older(
    metrics: Mapping[str, float], parts: Mapping[str, Sequence[Row]], versions: Mapping[str, int]
) -> dict[str, float]:
    """Return the metrics without the gap to the recorded log-probabilities if older weights recorded some."""
    older = any(_is_older(row, versions[policy]) for policy, rows in parts.items() for row in rows)
    return {name: value for name, value in metrics.items() if not (older and name.startswith("logprob_gap"))}


def _is_older(row: Row, newest: int) -> bool:
    return row.policy_version not in (newest, UNKNOWN_VERSION)


def _by_depth(gap_K: NDArray[np.float64], depth_K: NDArray[np.int64]) -> list[tuple[int, float]]:
    """Return the mean gap from each depth to the next; empty if all tokens are within one."""
    part_K = np.searchsorted(_DEPTHS, depth_K, side="right") - 1
    parts = np.unique(part_K)
    return [(_DEPTHS[part], float(gap_K[part_K == part].mean())) for part in parts] if len(parts) > 1 else []
