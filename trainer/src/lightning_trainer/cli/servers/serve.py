"""`lightning-rl serve`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from lightning_trainer.cli.servers.serving import tls_options
from lightning_trainer.flags.answers import loading_options
from lightning_trainer.flags.common import allow_blocked_option, given_flags
from lightning_trainer.flags.files import key_file_flag, listen_options, store_flag


@click.command(name="serve")
@click.argument("checkpoint", metavar="MODEL")
@listen_options()
@click.option("--name", help="Model name. Default: policy. Adapters of agents are served under their own names.")
@loading_options
@key_file_flag("File that keeps the key. Default: a temporary file, deleted when the server ends.")
@store_flag("Store that records every call. Default: calls are not recorded.")
@allow_blocked_option
@tls_options
def command(
    *,
    checkpoint: str,
    host: str,
    port: int,
    name: str | None,
    key_file: Path | None,
    store: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    plain_http: bool,
    allow_blocked: bool,
    **options: Any,
) -> None:
    """Serve MODEL behind an OpenAI-compatible endpoint.

    MODEL is a run's folder or checkpoint, a model folder, a hub id (owner/model or owner/model@revision), or
    smollm2-135m.

    If the agents of a run have their own adapters, each adapter is served under its name, and the starting model as
    base.

    When it is ready, it prints one line of JSON on stdout with the URL and the key file. Give clients URL/v1 as the
    base URL, and the key as the API key.
    """
    from lightning_spans.store.null import NullStore
    from lightning_trainer import models
    from lightning_trainer.backends.torch.backend import need_torch, open_torch
    from lightning_trainer.cli.servers.serving import ListenAddress, check_place, key_files, serve_until_stopped
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.lineage.blocks import refuse_blocked
    from lightning_trainer.session.answers import own_loading, read_subject
    from lightning_trainer.session.session import open_database

    need_torch()
    place = ListenAddress(host, port, tls_cert, tls_key, plain_http)
    check_place(place)
    folder = models.resolve(checkpoint)
    refuse_blocked(folder, allowed=allow_blocked)
    own = own_loading(read_subject(checkpoint))
    with ExitStack() as stack:  # loading weights may take minutes: first check that key and calls can be stored
        files = stack.enter_context(key_files(key_file))
        kept = stack.enter_context(open_database(store)) if store else NullStore()
        click.echo(f"loading {checkpoint} ...", err=True)
        learner = stack.enter_context(
            closing(open_torch(str(folder), **own | given_flags({"name": _name(name, folder), **options})))
        )
        app = create_app(kept, keys=files.keys, engine=learner.engines)
        names = [engine.model for engine in learner.engines]
        facts: dict[str, Any] = {"model": names[0]} if len(names) == 1 else {"models": names}
        serve_until_stopped(app, place, files, **facts)


def _name(name: str | None, folder: Path) -> str | None:
    """Return the model's name; None if the folder contains adapters, which have their own names."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.policies import ADAPTERS_NAME

    if not (folder / ADAPTERS_NAME).is_file():
        return name or "policy"
    if name is not None:
        raise ConfigError(f"{folder} holds adapters, which are served under their own names. Leave --name out.")
    return None
