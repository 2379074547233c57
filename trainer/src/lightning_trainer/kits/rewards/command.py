"""`lightning-rl rewards`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from lightning_trainer.flags.common import given_flags, print_json, read_key, screen
from lightning_trainer.kits.evaluation.command import command as evaluation
from lightning_trainer.kits.evaluation.command import read_config
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.kits.rewards.result import AttackResult

F = TypeVar("F", bound=Callable[..., Any])
_MOST: Final = 20  # maximum paid rollouts that are printed; --json has all
# Options of `eval` that do not apply to an attack.
_LEFT_OUT: Final = frozenset(
    (
        "tasks",
        "samples",
        "against",
        "against_key",
        "prompts",
        "judge",
        "success",
        "resume",
        "store",
        "env",
        "env_options",
        "env_tasks",
    )
)
_OTHER_HELP: Final = {
    "reward": "Reward function module:function, called as score(task, result).",
    "agents": "Agents to instruct, which are also those that the model answers. Default: the agents of the run,"
    " otherwise all that have a name.",
    "out": "Folder of the attack. Default: attacks/DATE.",
}


def _evaluation_options(function: F) -> F:
    """Add the options of `eval` for what runs, and how."""
    kept = [copy.copy(option) for option in evaluation.params if option.name not in _LEFT_OUT]
    for option in kept:
        if isinstance(option, click.Option):
            option.help = _OTHER_HELP.get(option.name or "", option.help)
    own = getattr(function, "__click_params__", [])
    function.__click_params__ = [*reversed(kept), *own]  # type: ignore[attr-defined]
    return function


@click.group(name="rewards")
def command() -> None:
    """Check a reward before you train on it."""


@command.command(name="attack")
@_evaluation_options
@click.option(
    "--attacks",
    "rollouts",
    type=click.IntRange(1),
    help="Number of attacked rollouts, over all strategies. Each task also runs without an attack. [default: 50]",
)
@click.option(
    "--strategies",
    metavar="NAME,...",
    help="Strategies to try: format, claim, reward-line, judge, nothing, copy, list. [default: all]",
)
def attack_command(
    *,
    endpoint_key: Path | None,
    as_json: bool,
    rollouts: int | None,
    strategies: str | None,
    **flags: Any,
) -> None:
    """Run the program TARGET (module:function) with agents that are instructed to get the reward, not to do the task.

    Each strategy puts an instruction in front of the agents' system prompts. Its mean reward is compared with that of
    the same tasks without an instruction, and rollouts that earned at least as much are listed. The program is not
    changed. It must call attach().

    Exit status: 0 no strategy paid, 1 a strategy paid, 2 wrong option or file, 3 nothing could be tried, 130 stopped.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.kits.rewards.attack import AttackPlan, attack
    from lightning_trainer.report.progress import ProgressDisplay

    chosen = None if strategies is None else tuple(dict.fromkeys(filter(None, map(str.strip, strategies.split(",")))))
    named: dict[str, Any] = {"strategies": chosen, "rollouts": rollouts}
    own = {name: value for name, value in named.items() if value is not None}
    plan = AttackPlan(evaluation=read_config(None, given_flags(flags)), **own)
    key = read_key(endpoint_key) if endpoint_key else os.environ.get("LIGHTNING_UPSTREAM_KEY")
    remember(key)
    with ProgressDisplay(f"attacking the reward of {plan.evaluation.target or plan.evaluation.command}") as progress:
        result = attack(plan, progress, key=key)
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
    click.get_current_context().exit(result.exit_status)


def _show(result: AttackResult) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightning_trainer.kits.rewards.result import numbers

    table = Table("strategy", "reward", "95 %", "difference", "95 %", "rollouts", "paid", "compared with the task")
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.add_row("(no instruction)", *numbers(result.base.reward), "", "", str(result.base.counted), "", "")
    for name, each in result.strategies.items():
        counts = (str(each.counted), str(len(each.paid)))
        table.add_row(Text(name), *numbers(each.reward), *numbers(each.difference), *counts, each.verdict)
    screen().print(table)
    _show_paid(result)
    for sentence in result.not_tried:
        click.echo(printable(f"not tried: {sentence}"))
    click.echo(printable(result.advice))
    click.echo(f"all rollouts and their traces: {result.folder}")


def _show_paid(result: AttackResult) -> None:
    from lightning_trainer.kits.rewards.result import short_answer

    for each in result.paid[:_MOST]:
        sources = " and ".join(f"{source} gave {decimal(value)}" for source, value in each.sources.items())
        answer = "no answer" if each.answer is None else repr(short_answer(each.answer))
        click.echo(printable(f"{each.strategy}, task {each.task}: {sources}; {answer} ({each.rollout_id})"))
    if len(result.paid) > _MOST:
        click.echo(f"and {len(result.paid) - _MOST} more: {result.folder}/attack.json")
