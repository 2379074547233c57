"""`lightning-rl doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from lightning_trainer.cli.options import print_json, read_key, screen


@click.command(name="doctor")
@click.option("--model", help="A model to look at, too: its parts, and what its chat template does.")
@click.option("--chat-template", help="Look at this Jinja file in place of the model's template, or hermes for ours.")
@click.option("--tool-format", help="How the model writes tool calls, where its chat template does not show it.")
@click.option("--store", metavar="URL", help="A store to look at, too.")
@click.option("--server", metavar="URL", help="A server to ask, too.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the server's key; else LIGHTNING_KEY.")
@click.option("--json", "as_json", is_flag=True, help="Print one finding a line, as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    model: str | None,
    chat_template: str | None,
    tool_format: str | None,
    store: str | None,
    server: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Say what works here, and what to do about what does not. The exit status is 1 when something does not."""
    from rich.text import Text

    from lightning_trainer.cli.setup.checks import examine

    styles = {"ok": "green", "broken": "red", "absent": "dim"}
    broken = False
    for finding in examine(model=model, store=store, server=server, key=read_key(key_file)):
        broken |= finding.state == "broken"
        if as_json:
            print_json(finding.to_json())
            continue
        line = Text(f"{finding.state:7}", style=styles[finding.state]).append(
            f"{finding.what}: {finding.found}", style=""
        )
        screen().print(line, soft_wrap=True)
        if finding.do and finding.state != "ok":
            screen().print(Text(f"       {finding.do}", style="yellow"), soft_wrap=True)
    if model is not None and not broken:
        _print_template(model, chat_template, tool_format, as_json=as_json)
    ctx.exit(1 if broken else 0)


def _print_template(model: str, chat_template: str | None, tool_format: str | None, *, as_json: bool) -> None:
    """Say what a model's chat template does; as JSON in one line, the last."""
    from lightning_trainer.gateway.prompt.doctor import examined
    from lightning_trainer.models import look
    from lightning_trainer.models.tokenizers import load_tokenizer

    folder = look(model).folder
    if folder is None:  # it is not fetched for this
        return
    report = examined(load_tokenizer(folder, chat_template), tool_format)
    if as_json:
        print_json(report.to_json())
        return
    for line in report.lines():
        screen().print(f"        {line}", soft_wrap=True, markup=False, highlight=False)
