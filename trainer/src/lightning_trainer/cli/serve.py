"""`lightning-rl serve`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from lightning_trainer.cli.options import given
from lightning_trainer.cli.serving import tls_options


@click.command(name="serve")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--name", help="Name of the model; policy by default. Adapters of agents have their own names.")
@click.option("--chat-template", help="Jinja file instead of the tokenizer's chat template, or hermes for ours.")
@click.option("--device", help="auto, cpu, cuda, ...")
@click.option("--dtype", help="auto, float32 or bfloat16.")
@click.option("--max-model-len", type=click.IntRange(2), help="Most tokens of prompt and answer together.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="Where to keep the key; else it goes with the server."
)
@click.option("--store", metavar="URL", help="Keep every call there; by default none is kept.")
@tls_options
def command(
    *,
    checkpoint: Path,
    host: str,
    port: int,
    name: str | None,
    key_file: Path | None,
    store: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    plain_http: bool,
    **options: Any,
) -> None:
    """Serve the folder CHECKPOINT, or any model folder, behind an OpenAI-compatible endpoint.

    Of a run in which agents have adapters of their own, each is served under its name, and the starting model as base.

    When it is ready, one line of JSON on stdout names the URL and the file with the key: give clients URL/v1 as base
    URL and the key as API key.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.backends import open_backend
    from lightning_trainer.cli.serving import Place, key_files, serve_until_stopped
    from lightning_trainer.forgetful import ForgetfulStore
    from lightning_trainer.local import opened
    from lightning_trainer.server.app import create_app

    if not checkpoint.exists():
        raise ConfigError(f"checkpoint {checkpoint} does not exist. Give a run's checkpoint folder, or a model folder.")
    folder = checkpoint / "checkpoint" if (checkpoint / "checkpoint").exists() else checkpoint
    with ExitStack() as stack:
        backend = stack.enter_context(
            closing(open_backend("torch", str(folder), given({"name": _name(name, folder), **options})))
        )
        kept = stack.enter_context(opened(store)) if store else ForgetfulStore()
        keys, files = stack.enter_context(key_files(key_file))
        app = create_app(kept, keys=keys, engine=backend.engines)
        names = [engine.model for engine in backend.engines]
        facts: dict[str, Any] = {"model": names[0]} if len(names) == 1 else {"models": names}
        serve_until_stopped(app, Place(host, port, tls_cert, tls_key, plain_http), files, **facts)


def _name(name: str | None, folder: Path) -> str | None:
    """Name the model, unless the folder has adapters, which are named."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.models import ADAPTERS_NAME

    if not (folder / ADAPTERS_NAME).is_file():
        return name or "policy"
    if name is not None:
        raise ConfigError(f"{folder} holds adapters, which are served under their own names. Leave --name out.")
    return None
