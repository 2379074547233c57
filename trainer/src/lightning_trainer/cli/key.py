"""`lightning-rl key`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="key")
@click.argument("scope", type=click.Choice(["live", "runner"]))
@click.option(
    "--key-file",
    default="lightning.key",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The server's admin key; its secret lies beside it.",
)
@click.option(
    "--days", default=30.0, show_default=True, type=click.FloatRange(0, min_open=True), help="How long it is good."
)
def command(*, scope: str, key_file: Path, days: float) -> None:
    """Print a new key: live for a program in production, which may send spans and no more, or runner."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.server.keys import Keys

    secret = key_file.with_name(f"{key_file.name}.secret")
    if not secret.is_file():
        raise ConfigError(f"{secret} is not there: it is made by the server. Name the server's --key-file.")
    click.echo(Keys.from_file(secret).issue("live" if scope == "live" else "runner", expires_s=days * 86400.0))
