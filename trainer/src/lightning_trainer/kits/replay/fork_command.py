"""`lightning-rl fork`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.answers import (
    answered_agents_option,
    chat_template_option,
    device_option,
    endpoint_option,
    max_model_len_option,
    model_option,
    name_by_option,
    system_messages_option,
)
from lightning_trainer.flags.common import print_json, read_key, screen
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_option, store_option
from lightning_trainer.flags.program import isolate_option, program_options
from lightning_trainer.kits.replay.fields import ForkFields
from lightning_trainer.kits.replay.flags import sampling_options, subject_of
from lightning_trainer.options.record import split_names
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from rich.tree import Tree

    from lightning_trainer.kits.replay.forking import ForkedAttempt
    from lightning_trainer.session.answers import Subject

_SHORT = 80  # most characters of an answer in a line


@click.command(name="fork")
@click.argument("target", required=False)
@field_option(ForkFields, "rollout", metavar="ID")
@field_option(ForkFields, "attempt", metavar="ID")
@field_option(ForkFields, "call", metavar="N", text="Call to change, counted from 0, as in `traces`.")
@field_option(ForkFields, "times", filled=True)
@click.option(
    "--with",
    "instead",
    metavar="MODEL",
    help="Sample that call from another model: a model as in --model, URL or MODEL=URL.",
)
@click.option(
    "--with-key",
    type=click.Path(path_type=Path),
    help="File with the key of the server in --with, if it is not the server in --endpoint.",
)
@field_option(ForkFields, "say", metavar="TEXT")
@model_option("Model for the calls after it", "[default: the run's]")
@endpoint_option("for the calls after it")
@answered_agents_option("[default: those that a policy answered]")
@name_by_option
@click.option(
    "--uncoupled", is_flag=True, help="Sample every later call again, even if its request equals a recorded one."
)
@field_option(ForkFields, "tools", filled=True)
@field_option(ForkFields, "run_tools", default="", metavar="NAME,...")
@field_option(ForkFields, "refuse_tools", default="", metavar="NAME,...")
@field_option(ForkFields, "dry_run", default=False)
@program_options()
@field_option(ForkFields, "data")
@sampling_options
@chat_template_option
@system_messages_option
@device_option
@max_model_len_option
@isolate_option
@store_option
@json_option
def command(
    *,
    as_json: bool,
    model: str | None,
    endpoint: str | None,
    instead: str | None,
    with_key: Path | None,
    uncoupled: bool,
    agents: str | None,
    run_tools: str,
    refuse_tools: str,
    **flags: Any,
) -> None:
    """Replay a recorded rollout of the program TARGET (module:function) with one model call changed.

    Every call before it gets its recorded answer, and no tool that ran is run again. The call is sampled --times times
    from --model or from another model (--with), or its answer is replaced by a text (--say). Later requests that equal
    a recorded one get the recorded answer, so that continuations differ only by what the call changed. Their rewards
    are shown next to the recorded one. In a run's folder, the program, its agents and its checkpoint are known: the
    one with the highest held-out reward, otherwise the newest. If the program deviates from the record before the call,
    the replay ends with the first difference.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.kits.replay import ForkConfig, Program, fork
    from lightning_trainer.report.progress import ProgressDisplay

    load = {name: flags.pop(name) for name in ("chat_template", "system_messages", "device", "max_model_len")}
    key = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    remember(key)
    subject = subject_of(model, endpoint, key)
    sampling = {name: flags.pop(name) for name in ("temperature", "max_tokens", "seed", "timeout_s", "workers")}
    program = Program(
        target=flags.pop("target"),
        command=flags.pop("program"),
        reward=flags.pop("reward"),
        agents=split_names(agents) or None if agents is not None else None,
        name_by=flags.pop("name_by"),
        subject=subject,
        isolate=bool(flags.pop("isolate")),
        load={name: value for name, value in load.items() if value is not None},
        **sampling,
    )
    config = ForkConfig(
        program=program,
        instead=_instead(instead, with_key, subject, key),
        coupled=not uncoupled,
        run_tools=split_names(run_tools),
        refuse_tools=split_names(refuse_tools),
        **flags,
    )
    with ProgressDisplay("replaying" if config.dry_run else f"forking call {config.call}") as progress:
        found = fork(config, progress)
    if as_json:
        print_json(found.result.to_json() | ({"replays": not found.result.ended} if config.dry_run else {}))
    elif config.dry_run:
        _show_replay(found)
    else:
        screen().print(_tree(found, config.call or 0))
    if not found.result.continuations:
        click.get_current_context().exit(2)  # the program differs from the record; the reasons are printed above


def _instead(text: str | None, file: Path | None, subject: Subject | None, key: str | None) -> Subject | None:
    """Return the model of the forked call, with the key in the file; the key of another server is not sent to it.

    Raises:
        ConfigError: there is no such model, or a key is given without a server.
    """
    from lightning_trainer.gateway.http.masking import remember
    from lightning_trainer.session.answers import Endpoint, read_subject

    found = None if text is None else read_subject(text)
    if not isinstance(found, Endpoint):
        if file is not None:
            raise ConfigError("--with-key is the key of a server: name it by --with URL or MODEL=URL.")
        return found
    if file is not None:
        key = read_key(file)
        remember(key)
    elif isinstance(subject, Endpoint) and urlsplit(subject.url).netloc != urlsplit(found.url).netloc:
        key = None
    return replace(found, key=key)


def _show_replay(found: ForkedAttempt) -> None:
    result, calls = found.result, len(found.recorded.record.calls)
    if result.ended:
        click.echo(printable(f"attempt {found.recorded.attempt_id} does not replay: {result.ended[0].reason}"))
        return
    (once,) = result.continuations
    same = "" if once.reward == result.recorded else f"; but its reward is {once.reward} and was {result.recorded}"
    failed = "" if once.error is None else f"; the program failed: {once.error.rpartition(chr(10))[2]}"
    click.echo(
        printable(f"attempt {found.recorded.attempt_id} replays: all {calls} calls are as recorded{same}{failed}")
    )


def _tree(found: ForkedAttempt, number: int) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    from lightning_trainer.rl.told import answer_text

    def line(reward: float | None, answer: str | None, more: str) -> Text:
        shown = "-" if reward is None else decimal(reward)
        cut = "" if not answer else answer if len(answer) <= _SHORT else answer[:_SHORT] + "..."
        return Text.assemble((f"{shown:>7}  ", "bold"), printable(cut.replace("\n", " ")), ("  " + more, "dim"))

    recorded, result = found.recorded, found.result
    tree = Tree(Text(printable(f"attempt {recorded.attempt_id}")))
    at = tree
    for call in recorded.record.calls[: number + 1]:
        message = call.node.answer.choices[0].message if call.node.answer.choices else {}
        text = f"call {call.number} {call.agent or '(no agent)'}"
        if call.number < number:
            at = tree.add(Text(printable(f"{text}: as recorded"), style="dim"))
        else:
            at = tree.add(Text(printable(text), style="bold"))
            at.add(line(result.recorded, answer_text(message), "recorded"))
    for each in result.continuations:
        failed = "" if each.error is None else f"failed: {each.error.rpartition(chr(10))[2]} "
        at.add(line(each.reward, each.answer, f"{failed}{each.attempt_id}"))
    for ended in result.ended:
        at.add(Text(printable(f"  ended: {ended.reason}"), style="red"))
    return tree
