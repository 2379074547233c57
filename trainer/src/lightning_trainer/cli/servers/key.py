"""`lightning-rl key`."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.flags.common import print_json, screen
from lightning_trainer.flags.files import admin_key_flag, json_flag, tenant_option
from lightning_trainer.flags.group import group_options

if TYPE_CHECKING:
    from lightning_trainer.gateway.auth.keys import Scope
    from lightning_trainer.gateway.auth.register import IssuedKey, Register

_FILE = admin_key_flag("Admin key of the server. Its secret and the list of issued keys are in files next to it.")
_DAYS = click.option(
    "--days",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Days until the key expires.",
)


@click.group(name="key")
def command() -> None:
    """Create, list and revoke the keys of a server."""


_TERMS = group_options(  # of the data that is sent with a key
    click.option("--source", metavar="NAME", help="Where the data comes from."),
    click.option("--retention-days", type=float, help="Days after which the data is neither used nor kept."),
    click.option(
        "--consent", type=click.Choice(["granted", "denied"]), help="Whether the data may be used for training."
    ),
    tenant_option("Tenant of all data that comes with this key."),
)


def _new(scope: Scope, text: str) -> None:
    @command.command(name=scope, help=text)
    @_FILE
    @_DAYS
    @click.option("--name", help="Holder of the key, by which it can be revoked. Default: a new name.")
    @(_TERMS if scope in {"live", "caller"} else group_options())
    def new(*, key_file: Path, days: float, name: str | None, **terms: Any) -> None:
        from lightning_spans.errors import ConfigError
        from lightning_spans.terms import make_terms
        from lightning_trainer.gateway.auth.keys import Keys

        if name is not None and "/" in name:
            raise ConfigError(
                f"--name {name!r}: leave out the slash. The server adds one itself, before a runner's worker or an"
                " evaluator's source, as in evaluator:shop/feedback."
            )
        holder = name or f"{scope}-{secrets.token_hex(3)}"
        click.echo(
            Keys.from_file(_secret(key_file)).issue(
                scope, expires_s=days * 86400.0, holder=holder, terms=make_terms(**terms)
            )
        )


_new("live", "Print a new key for a program in production. It can only send spans.")
_new("caller", "Print a new key for a program in production that calls models here. It can also send spans.")
_new("runner", "Print a new key for a runner. It can end and reward the attempts that were claimed with it.")
_new("evaluator", "Print a new key for a program that gives rewards.")
_new("viewer", "Print a new key for the viewer. It can read, and save or remove marks.")
_new("deployer", "Print a new key for a person who changes deployments in the viewer. It opens nothing else.")
_new("approver", "Print a new key for a person who approves candidates of `deploy`. It opens nothing else.")


@command.command(name="list")
@_FILE
@json_flag("Print one JSON object per line.")
def list_keys(*, key_file: Path, as_json: bool) -> None:
    """List all issued keys, including revoked and expired ones."""
    keys = _register(key_file).listed()
    if as_json:
        for key in keys:
            print_json(_row(key))
        return
    from rich.table import Table

    table = Table("id", "opens", "whose", "issued", "good until", "")
    for key in keys:
        row = _row(key)
        table.add_row(*(str(row[name] or "") for name in ("id", "scope", "holder", "issued", "expires", "state")))
    screen().print(table)


@command.command(name="revoke")
@click.argument("name")
@_FILE
def revoke(*, name: str, key_file: Path) -> None:
    """Revoke the key with the id NAME, or all keys of the holder NAME. The server notices within a second.

    Keys in the server's own key files are replaced by new ones.
    """
    from lightning_spans.errors import ConfigError

    found = _register(key_file).revoke(name)
    if not found:
        raise ConfigError(f"no valid key has the id or holder {name!r}: see `lightning-rl key list`.")
    for key in found:
        click.echo(f"revoked {key.key_id}: {key.scope} of {key.holder or 'nobody named'}")


def _row(key: IssuedKey) -> dict[str, str | None]:
    too_old = "too old" if key.expires_s < time.time() else "good"
    return {
        "id": key.key_id,
        "scope": key.scope,
        "holder": key.holder,
        "issued": _day(key.issued_s),
        "expires": _day(key.expires_s),
        "state": too_old if key.revoked_s is None else f"revoked {_day(key.revoked_s)}",
    }


def _day(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))


def _secret(key_file: Path) -> Path:
    from lightning_spans.errors import ConfigError

    secret = key_file.with_name(f"{key_file.name}.secret")
    if not secret.is_file():
        raise ConfigError(f"{secret} does not exist: the server creates it. Give the server's --key-file.")
    return secret


def _register(key_file: Path) -> Register:
    from lightning_trainer.gateway.auth.register import Register, register_of

    return Register(register_of(_secret(key_file)))
