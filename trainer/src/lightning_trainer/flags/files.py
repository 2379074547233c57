"""Options that name a file, a folder or an address, and the flags for JSON output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.options.files import PortOptions, ResumeOptions, RunFolderOptions, StoreOptions
from lightning_trainer.options.permits import PermitOptions
from lightning_trainer.options.selection import SelectionOptions

DEFAULT_STORE: Final = "lightning.db"  # where attach() writes outside a runner


def store_flag(text: str, **more: Any) -> Callable[[F], F]:
    """Return the option that names a store."""
    return field_option(StoreOptions, "store", metavar="URL", text=text, **more)


def default_store_flag(text: str) -> Callable[[F], F]:
    """Return the option that names a store, by default the one in the current folder."""
    return store_flag(text, default=DEFAULT_STORE, show_default=True)


def key_file_flag(text: str, **more: Any) -> Callable[[F], F]:
    """Return the option that names the file of a key."""
    return click.option("--key-file", type=click.Path(path_type=Path), help=text, **more)


def admin_key_flag(text: str) -> Callable[[F], F]:
    """Return the option that names the file of a server's own key."""
    return key_file_flag(text, default="lightning.key", show_default=True)


def server_flag(text: str, *, dest: str = "server", **more: Any) -> Callable[[F], F]:
    """Return the option that names a server."""
    return click.option("--server", dest, metavar="URL", help=text, **more)


def agent_flag(text: str, *, dest: str = "agent", **more: Any) -> Callable[[F], F]:
    """Return the option that names an agent."""
    return click.option("--agent", dest, metavar="NAME", help=text, **more)


def dry_run_flag(text: str) -> Callable[[F], F]:
    """Return the flag that shows what a command would do; the text describes what it shows."""
    return click.option("--dry-run", is_flag=True, help=text)


def json_flag(text: str) -> Callable[[F], F]:
    """Return the flag for JSON output; the text describes one line."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def config_file_option(text: str) -> Callable[[F], F]:
    """Return the option that names a TOML file of options."""
    return click.option("--config", "file", type=click.Path(path_type=Path), help=f"TOML file with {text}.")


def out_option(text: str) -> Callable[[F], F]:
    """Return the option that names the folder that a command writes."""
    return field_option(RunFolderOptions, "out", text=text)


def resume_option(text: str) -> Callable[[F], F]:
    """Return the option that names the folder to resume from."""
    return field_option(ResumeOptions, "resume", text=text)


def listen_options(more: str = "") -> Callable[[F], F]:
    """Return the options for a server's address and port; `more` is added to the help of the address."""
    return group_options(
        click.option("--host", default="127.0.0.1", show_default=True, help=f"Address to listen on{more}."),
        field_option(PortOptions, "port", text="Port to listen on; 0 picks a free port.", filled=True),
    )


def plain_http_option(keys: str) -> Callable[[F], F]:
    """Return the flag that allows a server without encryption; the text names the keys that can be read then."""
    return click.option(
        "--plain-http",
        is_flag=True,
        help=f"Serve other machines without encryption. {keys} can then be read on the network.",
    )


def rollouts_option(text: str) -> Callable[[F], F]:
    """Return the option that names rollouts; it may be repeated."""
    return click.option("--rollout", "rollouts", multiple=True, metavar="ID", help=f"{text}. May be repeated.")


def traces_option(text: str) -> Callable[[F], F]:
    """Return the option that names traces; it may be repeated."""
    return click.option("--trace", "traces", multiple=True, metavar="ID", help=f"{text}. May be repeated.")


def tenant_option(text: str) -> Callable[[F], F]:
    """Return the option that names a tenant."""
    return field_option(PermitOptions, "tenant", metavar="NAME", text=text)


origin_option = field_option(
    SelectionOptions, "origin", metavar="NAME", text="Only traces of this origin: training, live, or your own label."
)
store_option = default_store_flag("Store: a path, sqlite:///, postgresql:// or http://.")
key_file_option = key_file_flag("File with the key of the server. Default: LIGHTNING_KEY.")
json_option = json_flag("Print one JSON object.")
runs_option = click.option(
    "--runs",
    multiple=True,
    default=("runs", "loops"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder in which to look for checkpoints. May be repeated.",
)
loops_option = click.option(
    "--loops",
    default="loops",
    show_default=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of a `lightning-rl loop`, or of several. The viewer shows their stages with the store's deployments.",
)
