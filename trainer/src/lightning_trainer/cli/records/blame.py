"""`lightning-rl blame`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import ConfigError
from lightning_spans.store.urls import without_secrets
from lightning_trainer.flags.common import given_flags, print_json, reading, rewards_option, screen, trust_option
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_flag, key_file_option, rollouts_option, store_flag
from lightning_trainer.options.learning import CreditOptions

if TYPE_CHECKING:
    from lightning_spans.schema.attempts import Rollout
    from lightning_spans.schema.rewards import Reward
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.report.credit_report import CreditReport, TurnCredit
    from lightning_trainer.rl.batch.calls import CountedCall

_OF_FORKS: Final = ("forks", "alternatives", "orders", "fork_at", "fork_tools")


@click.command(name="blame")
@click.argument("run", type=click.Path(path_type=Path))
@field_option(CreditOptions, "credit", text="Use this credit assignment instead of the run's.")
@field_option(CreditOptions, "gamma", type=float, text="Discount factor of that credit assignment.")
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=int,
    help="Only rollouts of this step, counted from 1 as in the terminal; with --val: of the validation after this many"
    " steps. May be repeated.",
)
@click.option("--val", "held_out", is_flag=True, help="Show rollouts of held-out tasks instead of training tasks.")
@rollouts_option("Show the calls of this rollout")
@json_flag("Print JSON: one line per turn or call, then the account.")
@rewards_option
@store_flag("Store with the run's traces, if they are not in its folder.")
@trust_option
@key_file_option
def command(
    *,
    run: Path,
    credit: str | None,
    gamma: float | None,
    steps: Sequence[int],
    held_out: bool,
    rollouts: Sequence[str],
    as_json: bool,
    automatic: tuple[str, ...],
    store: str | None,
    trust: bool,
    key_file: Path | None,
) -> None:
    """Show which agents earned the reward in the training run in folder RUN: credit by agent and turn, and the account.

    A call's credit is its share of the rewards of its attempt. Its advantage is the difference from its baseline. In a
    run with several agents, all agents that have a name are compared, trained or not. The columns compared, better and
    worse count calls.
    """
    from lightning_trainer.report.credit_report import credit_report, turns_of
    from lightning_trainer.run.recomputed import recompute_batch

    named = given_flags({"rewards": automatic}).get("rewards", {})
    config = _config(run, credit, gamma, named)
    elsewhere = store or _store_of(run, config, trust=trust)
    with reading(elsewhere or str(run / "lightning.db"), key_file) as source:
        chosen = _choose_rollouts(run, source.rollouts(), steps, held_out=held_out, shared=elsewhere is not None)
        batch, outcomes = recompute_batch(config, source, chosen, imports=config.rewards if trust else named)
    report = credit_report(batch, outcomes, config.credit)
    calls = [call for call in batch.calls if call.transition.rollout_id in rollouts]
    if rollouts and not calls:
        other = "" if held_out else " For a held-out rollout, add --val."
        raise ConfigError(
            f"no call of {', '.join(rollouts)} counts in this run.{other} See lightning-rl traces --rollout"
            f" {rollouts[0]}."
        )
    turns = turns_of(batch.calls, config.agents)
    if as_json:
        for line in (
            [_call_json(call) for call in _sort_by_turn(calls)] if rollouts else [turn.to_json() for turn in turns]
        ):
            print_json(line)
        print_json({"account": report.to_json()})
        return
    _print_calls(_sort_by_turn(calls)) if rollouts else _print_turns(turns)
    _print_report(report)


def _store_of(run: Path, config: TrainConfig, *, trust: bool) -> str | None:
    """Return the store that a run's folder names; None: the one in the folder.

    Raises:
        ConfigError: it names one, and the folder is not trusted.
    """
    if config.store is not None and not trust:
        raise ConfigError(
            f"{run} names a store outside of it, {without_secrets(config.store)!r}. If the folder is yours, pass"
            " --trust, or name the store with --store."
        )
    return config.store


def _config(run: Path, credit: str | None, gamma: float | None, rewards: dict[str, Any]) -> TrainConfig:
    from lightning_trainer.config.files import CONFIG_NAME, read_kept
    from lightning_trainer.config.train import TrainConfig

    instead = "Give the folder of a run, such as runs/2026-11-20."
    if not (run / CONFIG_NAME).exists():
        raise ConfigError(f"there is no {CONFIG_NAME} in {run}. {instead}")
    values = read_kept(run, instead)
    if credit is not None:
        values |= {"credit": credit, "gamma": None, "credit_options": {}}
        values |= dict.fromkeys(_OF_FORKS)  # the calls that were sampled again are recorded; none are sampled now
    # the alternatives show who earned the reward; comparison within groups credits free riders equally
    if values.get("credit") == "counterfactual":
        values["credit_options"] = {**(values.get("credit_options") or {}), "group": False}
    if gamma is not None:
        values["gamma"] = gamma
    values["rewards"] = {**(values.get("rewards") or {}), **rewards}
    return TrainConfig(**{name: value for name, value in values.items() if value is not None})


def _choose_rollouts(
    run: Path, rollouts: Sequence[Rollout], steps: Sequence[int], *, held_out: bool, shared: bool
) -> list[Rollout]:
    """Return the ended rollouts of a run, of these steps, with the forks made from them."""
    from lightning_trainer.run.group_ids import groups_of, prefix_of

    mode = "val" if held_out else "train"
    found = groups_of((rollout.group_id for rollout in rollouts), run, shared=shared)
    wanted = {step if held_out else step - 1 for step in steps}  # training steps are stored from 0 and shown from 1
    groups = {group for group, step in found.items() if step.mode == mode and (not wanted or step.number in wanted)}
    ended = [each for each in rollouts if each.group_id in groups and each.status in ("succeeded", "failed")]
    if not ended:
        where = f": their ids start with {prefix_of(run)}, as its folder is called" if shared else ""
        what = f"{'held-out' if held_out else 'training'} rollout{''.join(f' of step {step}' for step in steps)}"
        raise ConfigError(f"no {what} has ended in this run{where}. `lightning-rl traces` lists its rollouts.")
    return ended


def _sort_by_turn(calls: Iterable[CountedCall]) -> list[CountedCall]:
    return sorted(calls, key=lambda c: (c.transition.attempt_id, c.transition.turn, c.transition.choice))


def _call_json(call: CountedCall) -> dict[str, Any]:
    transition = call.transition
    return {
        "rollout_id": transition.rollout_id,
        "attempt_id": transition.attempt_id,
        "turn": transition.turn,
        "choice": transition.choice,
        "agent": transition.agent,
        "span_id": transition.span_id,
        "credit": _number_or_none(call.credit),
        "advantage": _number_or_none(call.advantage),
        "left_out": call.left_out,
        "rewards": [_reward_json(reward) for reward in transition.rewards],
    }


def _reward_json(reward: Reward) -> dict[str, Any]:
    return {"source": reward.source, "agent": reward.agent, "value": reward.value}


def _number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _print_turns(turns: Sequence[TurnCredit]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("agent", "turn", "trained", "calls", "credit", "sum", "contrast", "compared", "better", "worse")
    for column in (table.columns[1], *table.columns[3:]):
        column.justify = "right"
    for turn in turns:
        table.add_row(
            turn.agent or Text("(no name)", style="dim"),
            str(turn.turn),
            Text("yes", style="green") if turn.trained else Text("no", style="dim"),
            f"{turn.calls}",
            _number(turn.credit),
            _number(turn.credit_sum if turn.credited else None),
            "-" if turn.contrast is None else f"{turn.contrast:.3f}",
            f"{turn.compared}",
            f"{round(turn.better * turn.compared)}",
            f"{round(turn.worse * turn.compared)}",
        )
    screen().print(table)


def _print_calls(calls: Sequence[CountedCall]) -> None:
    from rich.table import Table

    table = Table("attempt", "turn", "agent", "credit", "advantage", "own rewards, or why it was left out")
    for call in calls:
        own = " ".join(f"{reward.source} {reward.value:+.3g}" for reward in call.transition.rewards)
        table.add_row(
            call.transition.attempt_id,
            str(call.transition.turn),
            call.transition.agent or "(no name)",
            _number(_number_or_none(call.credit)),
            _number(_number_or_none(call.advantage)),
            call.left_out or own,
        )
    screen().print(table)


def _print_report(report: CreditReport) -> None:
    click.echo(f"credit: {report.credit}")
    for line in report.lines():
        click.echo(line)
