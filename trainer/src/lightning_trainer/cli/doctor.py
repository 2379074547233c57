"""`lightning-rl doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from lightning_trainer.cli.options import print_json, read_key, screen


@click.command(name="doctor")
@click.option("--model", help="A model folder to look at, too.")
@click.option("--store", metavar="URL", help="A store to look at, too.")
@click.option("--server", metavar="URL", help="A server to ask, too.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the server's key; else LIGHTNING_KEY.")
@click.option("--json", "as_json", is_flag=True, help="Print one finding a line, as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    model: str | None,
    store: str | None,
    server: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Say what works here, and what to do about what does not. The exit status is 1 when something does not."""
    from rich.text import Text

    from lightning_trainer.doctor import examine

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
    ctx.exit(1 if broken else 0)
