"""Turn conversations into rows: selected by agent, tokenized, split by task, with every omission counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_spans.errors import DataError
from lightning_spans.schema.agents import check_known, label, selects
from lightning_trainer.kits.export import choose
from lightning_trainer.kits.export.candidates import LineCandidate
from lightning_trainer.kits.export.episodes import digest
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason
from lightning_trainer.kits.sft.data import Example
from lightning_trainer.kits.sft.reasons import UnlearnedReason
from lightning_trainer.kits.sft.render import RenderedExample, Renderer, UnrenderableError
from lightning_trainer.policies import Policies
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsToLearn:
    """Rows made from conversations.

    Attributes:
        rows: of conversations; each token's advantage is 1.
        left_out: conversations that are in no row, by reason.
        recorded: number of rows with the tokens that an engine recorded.
    """

    rows: list[Row]
    left_out: Counter[str]
    recorded: int


def check_agents(data: Sequence[Example], agents: tuple[str, ...] | None) -> None:
    """Reject a name or glob that matches no agent of the conversations, if these name any.

    Args:
        data: everything that was read: a part of it need not contain every agent.
        agents: names and globs; None: all.

    Raises:
        UnknownAgentError: `agents` names an agent that the data does not have.
    """
    seen = {example.path for example in data if example.path is not None}
    if seen:
        check_known(agents or (), seen)


def agent_reader(data: Sequence[Example], agents: tuple[str, ...] | None) -> Callable[[Example], str | None]:
    """Return a function that gives the agent of a conversation.

    If the data names no agent, all of it belongs to the one in `agents`.

    Raises:
        DataError: the data names no agent, and `agents` names several.
    """
    if agents is None or any(example.path is not None for example in data):
        return lambda example: None if example.path is None else label(example.path, agents)
    if len(agents) > 1:
        raise DataError(
            f"the data does not name agents, so each line could belong to any of {', '.join(agents)}. Give --agents one"
            " name, or give each line its agent."
        )
    return lambda _: agents[0]


def make_rows(
    data: Sequence[Example],
    renderer: Renderer,
    *,
    agents: tuple[str, ...] | None,
    policies: Policies,
    max_length: int,
    min_reward: float | None = None,
) -> RowsToLearn:
    """Turn conversations into rows.

    Args:
        data: conversations.
        renderer: of the model.
        agents: names or globs of the agents whose answers are learned; None: all.
        policies: adapters of agents; if there are none, all agents share the weights.
        max_length: maximum tokens of a row.
        min_reward: minimum reward; None: any.

    Raises:
        DataError: nothing is left to learn from; the message lists the reasons.
    """
    agent_of = agent_reader(data, agents)
    left_out: Counter[str] = Counter()
    rows: list[Row] = []
    recorded = 0
    for number, example in enumerate(data):
        agent = agent_of(example)
        adapter = _adapter(example.path or agent, policies)
        reason = _why_not(example, example.path or agent, agents, min_reward)
        if reason is None and policies.by_agent and adapter is None:
            reason = UnlearnedReason.NO_ADAPTER
        if reason is not None:
            left_out[reason] += 1
            continue
        try:
            parts = renderer.render(example)
        except UnrenderableError as error:
            left_out[str(error)] += 1
            continue
        if any(len(part.ids) > max_length for part in parts):
            left_out[UntrainedReason.TOO_LONG] += 1
            continue
        rows += [_row(part, agent, adapter, number) for part in parts]
        recorded += sum(part.recorded for part in parts)
    if not rows:
        raise DataError(_nothing(data, left_out))
    return RowsToLearn(rows=rows, left_out=left_out, recorded=recorded)


def _why_not(
    example: Example, agent: str | None, agents: tuple[str, ...] | None, min_reward: float | None
) -> str | None:
    if agents is not None and not selects(agents, agent):
        return UntrainedReason.NOT_SELECTED
    if min_reward is None:
        return None
    if example.reward is None:
        return UnexportedReason.NO_REWARD
    return UnexportedReason.LOW_REWARD if example.reward < min_reward else None


def _adapter(agent: str | None, policies: Policies) -> str | None:
    adapter = policies.of(agent) if agent is not None else None
    return adapter if adapter in policies.adapters and adapter not in policies.fixed else None


def _row(part: RenderedExample, agent: str | None, adapter: str | None, number: int) -> Row:
    mask = np.array(part.learned, np.bool_)
    name = str(number)
    return Row(
        tokens=np.array(part.ids, np.int32),
        mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float64),
        lengths=(int(mask.sum()),),
        agent=agent or "",
        attempt_id=name,
        rollout_id=name,
        group_id=name,
        policy=adapter or "policy",
    )


def _nothing(data: Sequence[Example], left_out: Counter[str]) -> str:
    why = "\n".join(f"  {count}: {reason}" for reason, count in left_out.most_common())
    return f"there is nothing to learn: all {len(data)} conversations are left out.\n{why}"


def split_held_out(
    data: Sequence[Example], share: float, left_out: Counter[str]
) -> tuple[list[Example], list[Example]]:
    """Split conversations so that no task, group or first prompt is in both parts.

    Args:
        data: what was read.
        share: of the tasks to hold out.
        left_out: counts the conversations that are in neither part.
    """
    if not share:
        return list(data), []
    candidates = [
        LineCandidate(
            place=place, calls=1, agent=example.agent, reward=example.reward, group=example.group or f"line {place}",
            attempt=str(place), task=example.task or example.group, opening=_opening(example), validation=False,
            prompt=_opening(example), content=str(place),
        )
        for place, example in enumerate(data)
    ]  # fmt: skip
    parts = choose.split(candidates, ExportSelection(format="sft", held_out=share), left_out)
    return [data[each.place] for each in parts.training], [data[each.place] for each in parts.held_out]


def _opening(example: Example) -> str:
    """Return a digest of everything before the first answer."""
    if example.messages:
        return digest(list(example.messages[: example.answers[0]] if example.answers else example.messages))
    labels = example.labels or ()
    first = next((place for place, label in enumerate(labels) if label >= 0), len(labels))
    return digest((example.ids or ())[:first])


def batches(rows: Sequence[Row], size: int, steps: int, seed: int, together: int = 1) -> Iterator[list[Row]]:
    """Yield the rows of each step. Every epoch contains all rows, in its own order.

    Args:
        rows: to learn from.
        size: rows in a step.
        steps: number of steps.
        seed: of the orders.
        together: number of rows with similar beginnings that stay together, so that their common prefix is computed
            once. Each epoch cuts these runs at other places.
    """
    places = list(range(len(rows)))
    if together > 1:
        places.sort(key=lambda place: (rows[place].policy, rows[place].tokens.tolist()))
    order: list[int] = []
    epoch = 0
    for _ in range(steps):
        while len(order) < min(size, len(rows)):
            order += _shuffle_runs(places, together, random.Random(f"{seed}/{epoch}"))
            epoch += 1
        taken, order = order[:size], order[size:]
        yield [rows[place] for place in taken]


def _shuffle_runs(places: Sequence[int], together: int, numbers: random.Random) -> list[int]:
    """Cut places into runs of neighbours, and return all places with the runs in random order."""
    first = numbers.randrange(together) if together > 1 else 0
    runs = [places[max(0, start) : start + together] for start in range(-first, len(places), together)]
    numbers.shuffle(runs)
    return [place for run in runs for place in run]
