"""`lightning-rl doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from lightning_trainer.flags.answers import model_flag, system_messages_option
from lightning_trainer.flags.common import print_json, read_key, screen
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import json_flag, key_file_option, server_flag, store_flag
from lightning_trainer.options.model import MessageOptions


@click.command(name="doctor")
@model_flag("Also check this model: its files, and what its chat template does.")
@field_option(
    MessageOptions,
    "chat_template",
    text="Check this Jinja file instead of the model's template, or hermes for the built-in one.",
)
@system_messages_option
@field_option(
    MessageOptions, "tool_format", text="Format of the model's tool calls, if its chat template does not show it."
)
@store_flag("Also check this store.")
@server_flag("Also check this server.")
@click.option(
    "--tinker",
    metavar="URL",
    help="Also try this Tinker server: creates adapters on it and trains them on a few tokens. The model is --model, as"
    " the server names it, or its first.",
)
@key_file_option
@json_flag("Print one finding per line, as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    model: str | None,
    chat_template: str | None,
    system_messages: str | None,
    tool_format: str | None,
    store: str | None,
    server: str | None,
    tinker: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Check this installation and say how to fix what does not work. Exit status 1 if something does not work."""
    from rich.text import Text

    from lightning_trainer.cli.setup.checks import FRAMEWORKS, examine

    styles = {"ok": "green", "broken": "red", "absent": "dim"}
    broken, readable, absent = False, True, []
    local = model if tinker is None else None
    for finding in examine(model=local, store=store, server=server, key=read_key(key_file)):
        broken |= finding.state == "broken"
        readable &= finding.what not in ("model", "training") or finding.state == "ok"
        if as_json:
            print_json(finding.to_json())
            continue
        if finding.state == "absent" and finding.what in FRAMEWORKS:
            absent.append(finding.what)
            continue
        line = Text(f"{finding.state:7}", style=styles[finding.state]).append(
            f"{finding.what}: {finding.found}", style=""
        )
        screen().print(line, soft_wrap=True)
        if finding.do and finding.state != "ok":
            screen().print(Text(f"       {finding.do}", style="yellow"), soft_wrap=True)
    if absent:
        names = f"frameworks: {', '.join(absent)}. Install one only if your program imports it"
        screen().print(Text("absent ", style="dim").append(names, style=""), soft_wrap=True)
    if local is not None and readable:
        _print_template(local, chat_template, system_messages, tool_format, as_json=as_json)
    if tinker is not None:
        broken |= not _print_tinker(tinker, model, as_json=as_json)
    ctx.exit(1 if broken else 0)


def _print_tinker(url: str, model: str | None, *, as_json: bool) -> bool:
    """Print what a Tinker server supports, and return whether the backend works with it. JSON: one line, the last."""
    from lightning_trainer.backends.tinker.describe import describe, lines

    facts = describe(url, model)
    if as_json:
        print_json(facts)
    else:
        screen().print(f"Tinker server {url}", markup=False, highlight=False)
        for line in lines(facts):
            screen().print(f"        {line}", soft_wrap=True, markup=False, highlight=False)
    return bool(facts["fits"])


def _print_template(
    model: str, chat_template: str | None, system_messages: str | None, tool_format: str | None, *, as_json: bool
) -> None:
    """Print what a model's chat template does. JSON: one line, the last."""
    from lightning_trainer.gateway.prompt.doctor import examine_template
    from lightning_trainer.models import look
    from lightning_trainer.models.tokenizers import load_tokenizer

    folder = look(model).folder
    if folder is None:  # not downloaded for this check
        return
    report = examine_template(load_tokenizer(folder, chat_template, system_messages), tool_format)
    if as_json:
        print_json(report.to_json())
        return
    for line in report.lines():
        screen().print(f"        {line}", soft_wrap=True, markup=False, highlight=False)
