"""`lightning-rl server`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from lightning_trainer.cli.options import DEFAULT_STORE
from lightning_trainer.cli.serving import tls_options

if TYPE_CHECKING:
    from lightning_trainer.server.settings import Routing
    from lightning_trainer.server.upstream import Upstream


@click.command(name="server")
@click.option(
    "--store", default=DEFAULT_STORE, show_default=True, metavar="URL", help="A path, sqlite:/// or postgresql://."
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="MODEL=URL[,URL...]",
    help="OpenAI-compatible servers that answer for MODEL. May be repeated.",
)
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    help="Checkpoint of a run with --policy: vLLM at the one --upstream loads its adapters, each under its name.",
)
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="The upstream model's folder: conversations go to it as token ids, each continued exactly. May be repeated.",
)
@click.option(
    "--upstream-timeout", type=click.FloatRange(0, min_open=True), help="Most seconds of an answer; none by default."
)
@click.option(
    "--provider",
    metavar="URL",
    help="Where named agents' calls go that are none of --agents; by default to --model too.",
)
@click.option("--unrecorded", is_flag=True, help="Keep no record of the calls that go to --provider.")
@click.option(
    "--agents", "names", metavar="NAME,...", help="Agents whose calls runners send to the gateway; none by default."
)
@click.option("--model", help="The upstream model that these calls go to; the first one by default.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for other machines."
)
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--live-sample", default="1", show_default=True, metavar="SHARE", help="Share of production's traces that is kept."
)
@click.option(
    "--redact",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Field name, glob or /pattern/ that is masked in production's spans. May be repeated; see docs/live.md.",
)
@click.option("--endpoint", help="Base URL given to agents, where it is not the one that runners use.")
@click.option(
    "--key-file",
    default="lightning.key",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the admin key is written; those of runners, evaluators and live agents lie beside it.",
)
@click.option("--rotate-keys", is_flag=True, help="Sign with a new secret; keys of the one before it stay good.")
@tls_options
def command(
    *,
    store: str,
    upstreams: Sequence[str],
    adapters: Path | None,
    tokenizers: Sequence[str],
    upstream_timeout: float | None,
    provider: str | None,
    unrecorded: bool,
    names: str | None,
    model: str | None,
    host: str,
    port: int,
    live_sample: str,
    rules: Sequence[str],
    endpoint: str | None,
    key_file: Path,
    rotate_keys: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    plain_http: bool,
) -> None:
    """Run the store, a gateway to the upstreams named, and a receiver of traces (OTLP), for several machines.

    When it is ready, one line of JSON on stdout names the URL and the files with the keys: key_file for everything,
    runner_key_file for runners, evaluator_key_file for those who give rewards, live_key_file for agents in production.
    LIGHTNING_UPSTREAM_KEY is sent to upstreams that want a key, LIGHTNING_PROVIDER_KEY to the provider.
    """
    from lightning_spans.errors import ConfigError
    from lightning_spans.live import Live, parse_rate
    from lightning_spans.redaction import read_rules
    from lightning_trainer.cli.serving import Place, key_files, serve_until_stopped
    from lightning_trainer.local import opened
    from lightning_trainer.server.adapters import load_adapters
    from lightning_trainer.server.app import create_app
    from lightning_trainer.server.upstream import parse_provider, parse_upstream

    key = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    forwarded = [parse_upstream(text, key=key, total_s=upstream_timeout) for text in upstreams]
    forwarded += load_adapters(adapters, forwarded) if adapters else []
    forwarded = _with_tokenizers(forwarded, tokenizers)
    if unrecorded and provider is None:
        raise ConfigError("--unrecorded is about calls that go to --provider URL, which is not given.")
    elsewhere = parse_provider(provider, key=os.environ.get("LIGHTNING_PROVIDER_KEY")) if provider else None
    routing = _routing(names, model, [upstream.model for upstream in forwarded], endpoint)
    live = Live(rate=parse_rate(live_sample), redaction=read_rules(rules, os.environ))
    with opened(store) as kept, key_files(key_file, "runner", "evaluator", "live", rotate=rotate_keys) as (keys, files):
        app = create_app(
            kept,
            keys=keys,
            upstreams=forwarded,
            routing=routing,
            live=live,
            provider=elsewhere,
            record_untrained=not unrecorded,
        )
        known_as = (urlsplit(endpoint).hostname or "",) if endpoint else ()
        serve_until_stopped(app, Place(host, port, tls_cert, tls_key, plain_http, known_as), files)


def _routing(names: str | None, model: str | None, models: Sequence[str], endpoint: str | None) -> Routing:
    """Say which agents' calls go to which model."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.server.settings import Routing

    agents = tuple(name.strip() for name in names.split(",") if name.strip()) if names else ()
    if (agents or model) and not models:
        raise ConfigError("agents can't be sent to a model that is not there. Name one with --upstream MODEL=URL.")
    if model is not None and model not in models:
        raise ConfigError(f"--model {model} is none of the upstreams: {', '.join(models)}.")
    return Routing(agents=agents, model=model or (models[0] if models else "policy"), endpoint=endpoint)


def _with_tokenizers(upstreams: Sequence[Upstream], named: Sequence[str]) -> list[Upstream]:
    """Give upstreams with the tokenizers that are named for them.

    Raises:
        ConfigError: a name is no upstream's, or a folder has no tokenizer with a chat template.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.backends.tokenizers import load_tokenizer

    folders = {}
    for text in named:
        model, _, folder = text.partition("=")
        if not folder or model not in {upstream.model for upstream in upstreams}:
            raise ConfigError(f"--tokenizer {text!r}: must be MODEL=FOLDER, with the MODEL of an --upstream.")
        folders[model] = folder
    return [
        replace(each, tokenizer=load_tokenizer(folders[each.model])) if each.model in folders else each
        for each in upstreams
    ]
