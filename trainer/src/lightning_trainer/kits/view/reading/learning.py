"""A run's calls in training: the account, credit by agent and turn, the rows that calls share."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.transitions import Transition
from lightning_spans.store.protocol import Where, whole_list
from lightning_trainer import registry
from lightning_trainer.backends.verl.options.algorithms import on_verl
from lightning_trainer.choices import SELF
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.schedules.role_baselines import RAE
from lightning_trainer.kits.view.answers.calls import CallLink, RowPlace
from lightning_trainer.kits.view.answers.learning import AccountPage, CreditPage, Loss, TurnCell
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import OPEN, crash_reward, group_ids, tasks_and_rewards
from lightning_trainer.kits.view.reading.texts import view_message
from lightning_trainer.kits.view.reading.transcripts import number_or_none
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.credit_report import credit_report, turns_of
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.resampling import with_contrast
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.rollouts import outcomes as outcomes_of
from lightning_trainer.rl.rows import Row, why_untrainable
from lightning_trainer.run.group_ids import Step, step_of
from lightning_trainer.run.recomputed import Failures, recompute_batch

_LINKS: Final = 50  # calls to list per reason
_ENDS: Final = 12  # distinct calls to list, of the best and of the worst
_RANKED: Final = 2000  # calls among which they are searched
_SHORT: Final = 200


def ended_rollouts(reader: StoreReader, groups: Sequence[str]) -> list[Rollout]:
    """Return the rollouts of groups in which all have ended."""
    by_group: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in whole_list(reader, Rollout, Where(group_ids=list(groups))):
        by_group[rollout.group_id].append(rollout)
    return [each for its in by_group.values() if not any(r.status in OPEN for r in its) for each in its]


def batch_of(
    reader: StoreReader,
    run: Run,
    groups: Sequence[str],
    *,
    config: TrainConfig | None = None,
    every_agent: bool = True,
    failures: Failures | None = None,
    whole: bool = False,
) -> tuple[Batch, list[Outcome]] | None:
    """Rebuild the batch of some groups; None if the run's options are unknown, or nothing has ended.

    See `recompute_batch` for the options.
    """
    config = config or run.config
    rollouts = ended_rollouts(reader, groups) if config is not None else []
    if config is None or not rollouts:
        return None
    merge = config.backend != "verl" or on_verl(config).merge
    return recompute_batch(
        config,
        reader,
        rollouts,
        every_agent=every_agent,
        imports=run.imports,
        failures=failures,
        whole=whole,
        merge=merge,
    )


def batch_of_group(reader: StoreReader, run: Run, group_id: str | None) -> Batch | None:
    """Rebuild what a training step learned from one of its groups; None if that is impossible."""
    if group_id is None or not step_trains(group_id):
        return None
    try:
        made = batch_of(reader, run, [group_id], failures=partial(crash_reward, reader, run, step_of(group_id)))
    except LightningError:  # a reward rule that is not installed here, a credit assigner of another version
        return None
    return made[0] if made is not None else None


def judged_in(reader: StoreReader, run: Run, group_id: str | None) -> tuple[CountedCall, ...]:
    """Return the calls of a group with credit and advantage; none if they cannot be computed."""
    batch = batch_of_group(reader, run, group_id)
    return batch.calls if batch is not None else ()


def step_trains(group_id: str) -> bool:
    """Whether a group belongs to a training step."""
    return step_of(group_id).mode == "train"


def account_of(reader: StoreReader, run: Run, step: int) -> AccountPage:
    """Return the account of a step, each loss with some of its calls.

    Raises:
        ConfigError: the run's options are unknown, or nothing of the step has ended.
    """
    made = _rebuild_batch(reader, run, group_ids(reader, run, Step("train", step)))
    if made is None:
        raise ConfigError("there is no account: the run's options are not known, or no group of this step has ended.")
    batch, outcomes = made
    account = batch.account
    links: defaultdict[str, list[CallLink]] = defaultdict(list)
    for call in batch.calls:
        reason = call.left_out or why_untrainable(call.transition)
        if reason is not None and len(links[reason]) < _LINKS:
            links[reason].append(link_of(call))
    _link_failed(links, outcomes, batch.calls)
    told = next((line for line in run.lines() if line["kind"] == "train" and line["step"] == step), None)
    return AccountPage(
        step=step,
        seen=account.seen,
        trained=account.trained,
        rows=account.rows,
        merged=account.merged,
        rows_without_gradient=account.rows_without_gradient,
        tokens=account.tokens,
        tokens_in_rows=account.tokens_in_rows,
        tokens_steered=account.tokens_steered,
        losses=[
            Loss(reason=reason, calls=count, links=links[reason]) for reason, count in sorted(account.dropped.items())
        ],
        continued=account.continued,
        not_continued=dict(account.not_continued),
        unclaimed=dict(account.unclaimed),
        joined=account.joined,
        unjoined=dict(account.unjoined),
        same_as_run=None if told is None or run.config is None else _same(run.config, told, account.metrics()),
    )


def _rebuild_batch(reader: StoreReader, run: Run, groups: Sequence[str]) -> tuple[Batch, list[Outcome]] | None:
    """Rebuild the batch of a step. Groups without contrast are replaced round by round if the run did so."""
    config, rounds = run.config, [[each for each in groups if _round(each) == 0]]
    made = batch_of(reader, run, rounds[0], every_agent=False, whole=True)
    if made is None or config is None or not config.resample:
        return made

    def judge(some: Sequence[Outcome]) -> Batch:
        rollouts = [each.rollout for each in some]
        return recompute_batch(config, reader, rollouts, every_agent=False, imports=run.imports, whole=True)[0]

    def roll(_count: int, number: int) -> list[Outcome]:
        return outcomes_of(reader, ended_rollouts(reader, [each for each in groups if _round(each) == number]))

    return with_contrast(made[1], config.resample, judge, roll)


def _round(group_id: str) -> int:
    """Return the round in which a group replaced another, from its id; 0: an original group."""
    found = re.search(r":t\d+(?:r(\d+))?-\d+$", group_id)
    return int(found[1] or 0) if found else 0


def _same(config: TrainConfig, told: Mapping[str, Any], now: Mapping[str, float]) -> bool | None:
    """Whether an account is that of the run; None if the run's has rows that were added or left out afterwards."""
    if config.schedule is not None or config.opponents or config.with_prompts:
        return None
    # what these take off the advantages is not recorded
    unknown = config.algorithm == RAE or config.teacher == SELF or (config.kl_in == "reward" and config.kl_coef > 0)
    names = ("calls_seen", "calls_trained", "rows", *(() if unknown else ("rows_without_gradient",)))
    return all(told.get(name) == now[name] for name in names)


def _link_failed(links: dict[str, list[CallLink]], outcomes: Sequence[Outcome], calls: Iterable[CountedCall]) -> None:
    """Add links to attempts that do not count: their calls are seen, but got no credit."""
    counted = {call.transition.attempt_id for call in calls}
    for outcome in outcomes:
        for attempt in outcome.attempts:
            reason = outcome.why_left_out(attempt.attempt_id)
            if attempt.attempt_id not in counted and len(links[reason]) < _LINKS:
                links[reason].append(
                    CallLink(
                        rollout_id=outcome.rollout.rollout_id,
                        attempt_id=attempt.attempt_id,
                        span_id="",
                        agent=None,
                        turn=0,
                        text=(attempt.error or attempt.status)[-_SHORT:],
                    )
                )


def link_of(call: CountedCall) -> CallLink:
    """Return the link to a call."""
    transition = call.transition
    return CallLink(
        rollout_id=transition.rollout_id,
        attempt_id=transition.attempt_id,
        span_id=transition.span_id,
        agent=transition.agent,
        turn=transition.turn,
        credit=number_or_none(call.credit),
        advantage=number_or_none(call.advantage),
        text=_shown_answer(transition),
    )


def _shown_answer(transition: Transition) -> str:
    read = view_message(transition.message, _SHORT)
    return read.text or ", ".join(f"{use.name}({use.arguments[:80]})" for use in read.calls)


def credit_of(reader: StoreReader, run: Run, step: int | None, credit: str | None) -> CreditPage:
    """Return credit by agent and turn, by the run's credit assigner or another.

    Raises:
        ConfigError: the run's options are unknown, nothing has ended, or there is no such assigner.
    """
    config = run.config
    if config is not None and credit is not None and credit != config.credit:
        config = config.model_copy(update={"credit": credit, "gamma": None, "credit_options": {}})
    where = Step("train", step) if step is not None else None
    groups = [each for each in group_ids(reader, run, where) if step_trains(each)]
    made = batch_of(reader, run, groups, config=config)
    if made is None or config is None:
        raise ConfigError("there is no credit: the run's options are not known, or no group of this step has ended.")
    batch, outcomes = made
    report = credit_report(batch, outcomes, config.credit)
    ranked = sorted((c for c in batch.calls if not math.isnan(c.advantage)), key=lambda call: call.advantage)
    return CreditPage(
        credit=config.credit,
        credits=sorted(registry.registrations("credit")),
        cells=[
            TurnCell(
                agent=turn.agent, turn=turn.turn, calls=turn.calls, credit=turn.credit, contrast=turn.contrast,
                better=turn.better, worse=turn.worse, trained=turn.trained,
            )
            for turn in turns_of(batch.calls, config.agents if run.config is None else run.config.agents)
        ],
        best=distinct_links(reader, run, (call for call in reversed(ranked) if call.advantage > 0)),
        worst=distinct_links(reader, run, (call for call in ranked if call.advantage < 0)),
        lines=report.lines(),
    )  # fmt: skip


def distinct_links(reader: StoreReader, run: Run, calls: Iterable[CountedCall]) -> list[CallLink]:
    """Return the first calls that differ, with the number of calls identical to each.

    Calls are identical if the same agent gave the same answer to the same task at the same turn.
    """
    links = [link_of(call) for call in islice(calls, _RANKED)]
    known = tasks_and_rewards(reader, run, (link.rollout_id for link in links))
    found: dict[tuple[str | None, int, str, str], CallLink] = {}
    for link in links:
        task, reward = known.get(link.rollout_id, ("", None))
        key = (link.agent, link.turn, link.text, task)
        if (first := found.get(key)) is not None:
            found[key] = replace(first, times=first.times + 1)
        elif len(found) < _ENDS:
            found[key] = replace(link, task=task, reward=reward)
    return list(found.values())


def row_of(batch: Batch, transition: Transition) -> tuple[Row, RowPlace] | None:
    """Return the row of a call, and the calls that share it; None if it is in no row."""
    place = (transition.span_id, transition.choice)
    for row in batch.rows:
        if row.attempt_id == transition.attempt_id and place in row.calls:
            calls = [span_id for span_id, _ in row.calls]
            return row, RowPlace(calls=calls, tokens=len(row.tokens), trained=int(row.mask.sum()))
    return None
