"""Training rows as verl's trainer reads them from TransferQueue: keys, fields and tags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from lightning_trainer.backends.verl.encoding import encode, prompt_length, rewards_to_come, spans_of
from lightning_trainer.backends.verl.steps.dataset import SOURCE
from lightning_trainer.lineage.manifest import StepSources, merge_sources
from lightning_trainer.report.learned_tokens import row_name
from lightning_trainer.rl.rows import Row

_SOURCES: Final = "sources"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One row under its key.

    Attributes:
        key: ``{uid}_{rollout}_{row}``, from which verl reads the prompt and the rollout.
        fields: tensors and values.
        tag: what verl's replay buffer reads, and the row's name.
    """

    key: str
    fields: Mapping[str, Any]
    tag: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlPrompt:
    """A prompt of verl's.

    Attributes:
        uid: verl's name of it.
        step: the step for which it was sampled.
        values_as_rewards: give each call its value as a reward, for a critic; otherwise the rollout's reward.
    """

    uid: str
    step: int
    values_as_rewards: bool = False


def trajectories(
    prompt: VerlPrompt,
    rows_by_member: Sequence[Sequence[Row]],
    rewards: Sequence[float],
    sources: StepSources,
) -> list[Trajectory]:
    """Return the rows of a group in verl's format.

    Args:
        prompt: of the group.
        rows_by_member: for each rollout of the group, its rows; empty if it gave none.
        rewards: of each rollout.
        sources: of the group. verl saves its rows with a checkpoint, so the first row holds them.
    """
    laid = [
        _trajectory(prompt, f"{prompt.uid}_{member}_{index}", row, reward)
        for member, (rows, reward) in enumerate(zip(rows_by_member, rewards, strict=True))
        for index, row in enumerate(rows)
    ]
    for first in laid[:1]:
        first.fields["extra_fields"][_SOURCES] = asdict(sources)
    return laid


def read_sources(rows: Iterable[Mapping[str, Any]]) -> StepSources:
    """Return the sources of the groups that rows belong to, from the field `extra_fields` of each row."""
    return merge_sources([StepSources(**row["extra_fields"].get(_SOURCES, {})) for row in rows])


def _trajectory(prompt: VerlPrompt, key: str, row: Row, reward: float) -> Trajectory:
    first, spans = prompt_length(row), spans_of(row)
    tokens = torch.from_numpy(row.tokens).to(torch.int64)
    mask = torch.from_numpy(row.mask[first:]).to(torch.int64)
    scores = torch.zeros(len(mask), dtype=torch.float32)
    placed = rewards_to_come(spans) if prompt.values_as_rewards else [(spans[-1].start + spans[-1].length - 1, reward)]
    for place, value in placed:
        scores[place] = value
    fields = {
        "prompts": tokens[:first],
        "responses": tokens[first:],
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.from_numpy(row.logprobs[first:]).to(torch.float32),
        "rm_scores": scores,
        "uid": encode(spans),
        "num_turns": row.transitions,
        "data_source": SOURCE,
        "reward_model": {},
        "extra_fields": {"agent": row.agent},
        "multi_modal_inputs": {},
    }
    # A row's version is that of the weights that began its calls; verl numbers weights by the step that produced them.
    tag = {
        "status": "success",
        "prompt_len": first,
        "response_len": len(mask),
        "seq_len": len(tokens),
        "global_steps": prompt.step,
        "min_global_steps": row.policy_version,
        "max_global_steps": row.policy_version,
        "row": row_name(row).hex(),
    }
    return Trajectory(key, fields, tag)
