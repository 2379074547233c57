"""From conversations to rows: chosen by agent, written for a tokenizer, held out by task, each left out counted."""

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
from lightning_trainer.kits.export.wanted import Unexported, Wanted
from lightning_trainer.kits.sft.data import Example
from lightning_trainer.kits.sft.reasons import Unlearned
from lightning_trainer.kits.sft.render import Rendered, Renderer, UnrenderableError
from lightning_trainer.policies import Policies
from lightning_trainer.rl.account import Untrained
from lightning_trainer.rl.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsToLearn:
    """What is learned from.

    Attributes:
        rows: of conversations; each token's advantage is 1.
        left_out: conversations that are in no row, by reason.
        recorded: rows with the tokens that an engine recorded.
    """

    rows: list[Row]
    left_out: Counter[str]
    recorded: int


def check_agents(data: Sequence[Example], agents: tuple[str, ...] | None) -> None:
    """Refuse a name or glob of an agent that no conversation is of, where they name any.

    Args:
        data: all that was read: a part of it need not have every agent.
        agents: names and globs; None: all.

    Raises:
        UnknownAgentError: an agent is named here that the data does not have.
    """
    seen = {said.path for said in data if said.path is not None}
    if seen:
        check_known(agents or (), seen)


def named(data: Sequence[Example], agents: tuple[str, ...] | None) -> Callable[[Example], str | None]:
    """Return what says whose words a conversation holds.

    Data that names no agent is of the one that is named here.

    Raises:
        DataError: it names none, and several are named here.
    """
    if agents is None or any(said.path is not None for said in data):
        return lambda said: None if said.path is None else label(said.path, agents)
    if len(agents) > 1:
        raise DataError(
            f"the data names no agent, so nobody knows whose words these are: {', '.join(agents)}? Give --agents one"
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
    """Write conversations as rows.

    Args:
        data: conversations.
        renderer: of the model.
        agents: names or globs of those whose words are learned; None: all.
        policies: adapters of agents; where there are none all share the weights.
        max_length: longest row.
        min_reward: least reward; None: any.

    Raises:
        DataError: nothing is left to learn from; the message has the reasons.
    """
    agent_of = named(data, agents)
    left_out: Counter[str] = Counter()
    rows: list[Row] = []
    recorded = 0
    for number, said in enumerate(data):
        agent = agent_of(said)
        adapter = _adapter(said.path or agent, policies)
        reason = _why_not(said, said.path or agent, agents, min_reward)
        if reason is None and policies.by_agent and adapter is None:
            reason = Unlearned.NO_ADAPTER
        if reason is not None:
            left_out[reason] += 1
            continue
        try:
            parts = renderer.render(said)
        except UnrenderableError as error:
            left_out[str(error)] += 1
            continue
        if any(len(part.ids) > max_length for part in parts):
            left_out[Untrained.TOO_LONG] += 1
            continue
        rows += [_row(part, agent, adapter, number) for part in parts]
        recorded += sum(part.recorded for part in parts)
    if not rows:
        raise DataError(_nothing(data, left_out))
    return RowsToLearn(rows=rows, left_out=left_out, recorded=recorded)


def _why_not(said: Example, agent: str | None, agents: tuple[str, ...] | None, min_reward: float | None) -> str | None:
    if agents is not None and not selects(agents, agent):
        return Untrained.NOT_SELECTED
    if min_reward is None:
        return None
    if said.reward is None:
        return Unexported.NO_REWARD
    return Unexported.LOW_REWARD if said.reward < min_reward else None


def _adapter(agent: str | None, policies: Policies) -> str | None:
    adapter = policies.of(agent) if agent is not None else None
    return adapter if adapter in policies.adapters and adapter not in policies.fixed else None


def _row(part: Rendered, agent: str | None, adapter: str | None, number: int) -> Row:
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


def held_out(data: Sequence[Example], share: float, left_out: Counter[str]) -> tuple[list[Example], list[Example]]:
    """Split conversations: no task, no group and no first prompt is in both parts.

    Args:
        data: what was read.
        share: of the tasks.
        left_out: counts the conversations that are in neither part.
    """
    if not share:
        return list(data), []
    candidates = [
        LineCandidate(
            place=place, calls=1, agent=said.agent, reward=said.reward, group=said.group or f"line {place}",
            attempt=str(place), task=said.task or said.group, opening=_opening(said), validation=False,
            prompt=_opening(said), content=str(place),
        )
        for place, said in enumerate(data)
    ]  # fmt: skip
    parts = choose.split(candidates, Wanted(format="sft", held_out=share), left_out)
    return [data[each.place] for each in parts.training], [data[each.place] for each in parts.held_out]


def _opening(said: Example) -> str:
    """Digest what stands before the first answer."""
    if said.messages:
        return digest(list(said.messages[: said.answers[0]] if said.answers else said.messages))
    labels = said.labels or ()
    first = next((place for place, label in enumerate(labels) if label >= 0), len(labels))
    return digest((said.ids or ())[:first])


def batches(rows: Sequence[Row], size: int, steps: int, seed: int, together: int = 1) -> Iterator[list[Row]]:
    """Return the rows of each step: every epoch goes through all of them, in an order of its own.

    Args:
        rows: to learn from.
        size: rows in a step.
        steps: how many.
        seed: of the orders.
        together: rows that stand next to each other by their beginnings are drawn so many at a time: what they have in
            common goes forward once. They are cut at other places in each epoch.
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
    """Cut places into runs of neighbours, and return all of them with the runs in a random order."""
    first = numbers.randrange(together) if together > 1 else 0
    runs = [places[max(0, start) : start + together] for start in range(-first, len(places), together)]
    numbers.shuffle(runs)
    return [place for run in runs for place in run]
