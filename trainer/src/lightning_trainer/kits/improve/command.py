"""`lightning-rl improve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.answers import reflect_option, server_key_option
from lightning_trainer.flags.common import GroupedCommand, config_options, given_flags, print_json, read_key, screen
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import config_file_option, dry_run_flag, json_option, out_option, resume_option
from lightning_trainer.kits.improve.fields import ImproveFields
from lightning_trainer.options.record import split_names
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.intervals import Estimate
    from lightning_trainer.kits.improve.config import ImproveConfig
    from lightning_trainer.kits.improve.result import Improvement

# Options of `train` that the search sets itself.
LEFT_OUT: Final = frozenset(
    (
        "target", "steps", "epochs", "until", "resume", "out", "val_every", "val_samples", "keep", "checkpoint",
        "store", "port", "agent_weight", "rollback_on_cliff", "judge", "schedule", "opponents",
        "opponents_every",
    )
)  # fmt: skip
_OWN: Final = ("budget", "samples", "sft")
_TEACHER: Final = ("teacher", "teacher_options")  # options of the method distil


@click.command(name="improve", cls=GroupedCommand)
@click.argument("target", required=False)
@field_option(ImproveFields, "budget", metavar="TOKENS")
@field_option(ImproveFields, "methods", metavar="NAME,...")
@field_option(ImproveFields, "samples")
@field_option(ImproveFields, "sft")
@reflect_option()
@server_key_option("reflect", "LIGHTNING_REFLECT_KEY")
@config_file_option("options of train as keys")
@dry_run_flag("Run a few tasks, print how the budget would be divided, and stop.")
@out_option("Folder of the search. Default: runs/DATE.")
@resume_option("Resume the search in this folder.")
@json_option
@config_options(leave_out=LEFT_OUT)
def command(
    *, resume: Path | None, out: Path | None, reflect_key: Path | None, dry_run: bool, as_json: bool, **flags: Any
) -> None:
    """Improve the agents of the program TARGET (module:function) within one budget of tokens.

    For each agent, successive halving chooses between prompt optimisation, fine-tuning on its best rollouts, RL and
    distillation: all methods get a small share of the budget, the better half a larger one, the best one the rest. They
    are compared on one half of the held-out tasks. The best candidate of each agent is compared with the unchanged
    agents on all held-out tasks, and replaces them only if it is better with confidence.

    The folder can be passed to eval and serve. --resume continues an interrupted search.
    """
    from lightning_trainer.kits.improve.improve import improve, plan_search
    from lightning_trainer.report.progress import ProgressDisplay

    config = _read(resume, reflect_key, given_flags(flags if resume is None else {**flags, "out": out}))
    program = config.train.target or config.train.command
    if dry_run:
        plan = plan_search(config)
        print_json(plan.to_json()) if as_json else click.echo(printable("\n".join(plan.lines()), lines=True))
        plan.check()
        return
    with ProgressDisplay(f"improving {program}: {', '.join(config.methods)}") as progress:
        found = improve(config, progress, out=out, resume=resume)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)


def _read(resume: Path | None, reflect_key: Path | None, flags: dict[str, Any]) -> ImproveConfig:
    from lightning_trainer.config.passwords import hidden_options
    from lightning_trainer.kits.improve.config import ImproveConfig, read_options, read_stored
    from lightning_trainer.kits.prompts.reflection import read_reflection

    if resume is not None:
        hidden = hidden_options(read_stored(resume)) if flags else []
        if wrong := [name for name in flags if name not in hidden]:
            given = ", ".join("TARGET" if name == "target" else f"--{name.replace('_', '-')}" for name in wrong)
            raise ConfigError(f"a resumed search keeps its options: leave out {given}.")
        url = read_reflection(flags["reflect"], reflect_key).url if "reflect" in flags else None
        key = read_key(reflect_key) if reflect_key else os.environ.get("LIGHTNING_REFLECT_KEY")
        return read_options(resume, key, {"train": flags, "distil": flags, "reflect": {"url": url}})
    file, reflect, methods = flags.pop("file", None), flags.pop("reflect", None), flags.pop("methods", None)
    own = {name: flags.pop(name) for name in _OWN if name in flags}
    distil: dict[str, Any] = {name: flags.pop(name) for name in _TEACHER if name in flags}
    if "budget" not in own:
        raise ConfigError("give the number of tokens to spend: --budget TOKENS.")
    able = ("prompts",) * (reflect is not None) + ("sft", "rl") + ("distil",) * ("teacher" in distil)
    named = able if methods is None else split_names(methods)
    return ImproveConfig(
        train=_with_adapters(file, flags),
        methods=tuple(dict.fromkeys(named)),
        reflect=None if reflect is None else read_reflection(reflect, reflect_key),
        distil=distil,
        **own,
    )


def _with_adapters(file: Path | None, flags: dict[str, Any]) -> TrainConfig:
    """Return the options of a run, with adapters unless a rank is given: their learning rate depends on it."""
    from lightning_trainer.config.files import merge, read_toml
    from lightning_trainer.policies import DEFAULT_RANK

    ranked = "lora_rank" in flags or (file is not None and "lora_rank" in read_toml(file))
    return merge(file, flags if ranked else {**flags, "lora_rank": DEFAULT_RANK})


def _show(found: Improvement) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("agent", "method", "tokens", "difference", "95 %", "rungs", "")
    for column in ("tokens", "difference", "95 %", "rungs"):
        next(c for c in table.columns if c.header == column).justify = "right"
    for name, agent in found.agents.items():
        for method, bought in agent.methods.items():
            best = bought.best
            numbers = ("-", "-") if best is None else _numbers(best.difference)
            note = "candidate" if method == agent.candidate else _why(bought.ended)
            cells = (str(bought.tokens), *numbers, str(bought.rung), Text(printable(note)))
            table.add_row(Text(printable(name)), method, *cells)
    screen().print(table)
    click.echo(f"Differences to the unchanged agents, paired, on {found.tasks[0]} tasks by which methods were chosen.")
    for name in found.agents:
        click.echo(printable(f"{name}: {_verdict(found, name)}"))
    if found.decision.kept:
        mean, interval = _numbers(found.decision.together)
        click.echo(f"together: {mean} ({interval}). Corrected as for {found.decision.comparisons:.1f} comparisons.")
    else:
        click.echo("Nothing is better than the unchanged agents with confidence, so they are returned.")
    spent = sum(agent.tokens for agent in found.agents.values())
    click.echo(
        f"{spent} of {found.budget} tokens spent; measuring took {found.measured} more, in {found.seconds:.0f} s"
    )
    if found.prompts is not None:
        click.echo(f'prompts: attach(prompts="{found.prompts}"), eval --prompts {found.prompts}')
    click.echo(f"weights: lightning-rl serve {found.folder}")


def _why(ended: str) -> str:
    """Return why a method ended, as one line: what happened, and the most common reason if there are some."""
    what, *reasons = ended.split("\n")
    first = reasons[0].strip() if reasons and reasons[0].startswith("  ") else ""
    return f"{what} {first}".strip()


def _verdict(found: Improvement, agent: str) -> str:
    if agent not in found.decision.differences:
        return "no method gained anything: the base is kept"
    mean, interval = _numbers(found.decision.differences[agent])
    kept = found.method_of(agent)
    tasks = amount(sum(found.tasks), "held-out task")
    return f"{found.agents[agent].candidate} {mean} ({interval}) on all {tasks}: {kept} is kept"


def _numbers(found: Estimate) -> tuple[str, str]:
    mean = "-" if found.mean is None else decimal(found.mean)
    return mean, "-" if found.low is None or found.high is None else f"{decimal(found.low)} to {decimal(found.high)}"
