"""`lightning-rl prompts`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import is_glob
from lightning_trainer.flags.answers import (
    endpoint_option,
    model_option,
    name_by_option,
    reflect_option,
    server_key_option,
)
from lightning_trainer.flags.common import given_flags, print_json, read_key
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_option
from lightning_trainer.flags.program import (
    columns_option,
    concurrency_option,
    data_option,
    isolate_option,
    program_options,
    take_work,
    timeout_option,
    work_options,
)
from lightning_trainer.kits.prompts.fields import PromptsFields
from lightning_trainer.options.record import split_names
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from lightning_trainer.kits.prompts.search import PromptResult
    from lightning_trainer.session.answers import Subject


@click.command(name="prompts")
@click.argument("target", required=False)
@data_option(required=True)
@columns_option
@field_option(PromptsFields, "val")
@field_option(PromptsFields, "agents", required=True, metavar="NAME,...")
@reflect_option(required=True)
@server_key_option("reflect", "LIGHTNING_REFLECT_KEY")
@field_option(PromptsFields, "budget", required=True)
@field_option(PromptsFields, "tokens")
@field_option(PromptsFields, "out", required=True)
@program_options()
@model_option("Model to call", "Default: the program's own endpoints.")
@endpoint_option("to call")
@server_key_option("endpoint", "LIGHTNING_UPSTREAM_KEY")
@field_option(PromptsFields, "minibatch")
@field_option(PromptsFields, "seed", text="Seed of the search.")
@concurrency_option
@timeout_option(" [default: 300]")
@isolate_option
@name_by_option
@work_options
@click.option("--resume", is_flag=True, help="Resume the search that writes to --out; give the same options.")
@json_option
def command(*, reflect: str, reflect_key: Path | None, resume: bool, as_json: bool, **flags: Any) -> None:
    """Optimise the system prompts of agents in the program TARGET (module:function). The program is not changed.

    The current prompts are read from the agents' requests. A model proposes new ones from rewards and tool errors
    (GEPA). Each proposal is tried by replacing the prompt in the requests. The best prompts are written to --out, with
    a diff in a file next to it. attach(prompts="FILE") applies them.
    """
    from lightning_trainer.kits.prompts.optimise import optimise
    from lightning_trainer.kits.prompts.options import PromptsConfig
    from lightning_trainer.kits.prompts.reflection import read_reflection
    from lightning_trainer.report.progress import ProgressDisplay
    from lightning_trainer.session.answers import chosen_agents, name_rules, refuse_unheard

    target, program, agents = flags.pop("target"), flags.pop("program"), flags.pop("agents")
    if (target is None) == (program is None):
        raise ConfigError("name the agent: a TARGET module:function, or --command, and one of them.")
    names = split_names(agents)
    if not names or any(map(is_glob, names)):
        raise ConfigError(f"--agents {agents!r}: give the agents' exact names, with commas between.")
    subject = _subject(flags.pop("model"), flags.pop("endpoint"), flags.pop("endpoint_key"))
    refuse_unheard(given_flags({"name_by": flags["name_by"]}), subject)
    config = PromptsConfig(
        target=target,
        command=program,
        agents=names,
        reflect=read_reflection(reflect, reflect_key),
        subject=subject,
        answered=chosen_agents(subject) or ("*",),
        work=take_work(flags),
        **{"name_by": name_rules(subject), **given_flags(flags)},
    )
    with ProgressDisplay(f"prompts of {', '.join(names)} in {target or program}") as progress:
        found = optimise(config, progress, resume=resume)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, config.budget)


def _subject(model: str | None, url: str | None, key_file: Path | None) -> Subject:
    """Return the model that answers the agents' calls."""
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.session.answers import AsItIs, endpoint, read_subject

    key = read_key(key_file) if key_file else os.environ.get("LIGHTNING_UPSTREAM_KEY")
    remember(key)
    if url:
        return endpoint(url, model=model, key=key)
    return read_subject(model, key=key) if model else AsItIs()


def _show(found: PromptResult, budget: int) -> None:
    if found.diff:
        click.echo(printable(found.diff, lines=True))
    rewards = f"{decimal(found.before)} to {decimal(found.after)}" if found.diff else decimal(found.before)
    click.echo(f"reward {rewards} on the tasks to choose by, {found.rollouts} rollouts")
    if found.ended == "tokens":
        click.echo(f"it ended before its {budget} rollouts: {found.tokens} tokens were used (--tokens)")
    if found.ended == "ceiling":
        reached = f"every task to choose by has the full reward of {found.after:g}"
        click.echo(f"it ended before its {budget} rollouts: {reached}")
    if found.diff:
        click.echo(f'apply it: attach(prompts="{found.file}")')
    else:
        click.echo("no better prompt was found, so there is nothing to apply: keep the current prompts")
