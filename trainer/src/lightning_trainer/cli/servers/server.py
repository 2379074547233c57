"""`lightning-rl server`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from lightning_trainer.cli.servers.serving import tls_options
from lightning_trainer.flags.answers import agents_flag, model_flag, name_by_option, system_messages_option
from lightning_trainer.flags.common import allow_blocked_option
from lightning_trainer.flags.files import admin_key_flag, default_store_flag, listen_options, loops_option
from lightning_trainer.options.record import split_names

if TYPE_CHECKING:
    from lightning_trainer.cli.servers.serving import ListenAddress
    from lightning_trainer.gateway.app import App
    from lightning_trainer.gateway.settings import Routing
    from lightning_trainer.gateway.upstream.upstream import Upstream
    from lightning_trainer.kits.view.routes import Views
    from lightning_trainer.naming import NameRule


@click.command(name="server")
@default_store_flag("Store: a path, sqlite:/// or postgresql://.")
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="MODEL=URL[,URL...]",
    help="OpenAI-compatible servers for MODEL. May be repeated.",
)
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    help="Checkpoint of a run with --policy. The vLLM server in --upstream (exactly one) loads its"
    " adapters, each under its own name.",
)
@allow_blocked_option
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="MODEL=FOLDER",
    help="Folder of the upstream model. Its conversations are sent as token ids, so that each turn"
    " continues the previous one exactly. May be repeated.",
)
@click.option(
    "--tool-format",
    "tool_formats",
    multiple=True,
    metavar="MODEL=NAME",
    help="Format of MODEL's tool calls, if the chat template in --tokenizer does not show it. May be repeated.",
)
@system_messages_option
@click.option(
    "--upstream-key",
    "upstream_keys",
    multiple=True,
    metavar="MODEL=FILE",
    help="File with the key for the servers of MODEL. Default: LIGHTNING_UPSTREAM_KEY_MODEL. May be repeated.",
)
@click.option(
    "--upstream-timeout",
    type=click.FloatRange(0, min_open=True),
    help="Time limit of an answer, in seconds. Default: none.",
)
@click.option(
    "--provider",
    metavar="URL",
    help="Endpoint for calls of named agents that are not in --agents. Default: these calls also go to --model.",
)
@click.option("--unrecorded", is_flag=True, help="Do not record the calls that go to --provider.")
@agents_flag("Agents whose calls runners send to the gateway. Default: none.", dest="names")
@name_by_option
@model_flag("Upstream model for these calls. Default: the first one.")
@listen_options("; 0.0.0.0 accepts other machines")
@click.option(
    "--live-sample", default="1", show_default=True, metavar="SHARE", help="Share of production traces to keep."
)
@click.option(
    "--redact",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Field name, glob or /pattern/ to mask in production data. May be repeated. See docs/how-to/live.md.",
)
@click.option("--endpoint", help="Base URL for agents, if it differs from the one that runners use.")
@admin_key_flag("File for the admin key. The keys of runners, evaluators and live agents are in files next to it.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Change a limit of the server, such as attempt_calls=50000. A wrong NAME lists all of them. May be repeated.",
)
@click.option(
    "--rotate-keys", is_flag=True, help="Sign with a new secret. Keys signed with the previous one stay valid."
)
@loops_option
@tls_options
def command(
    *,
    store: str,
    adapters: Path | None,
    allow_blocked: bool,
    provider: str | None,
    unrecorded: bool,
    endpoint: str | None,
    key_file: Path,
    rotate_keys: bool,
    **flags: Any,
) -> None:
    """Run the store, a gateway to the upstream servers, and a trace receiver (OTLP), for several machines.

    When it is ready, it prints one line of JSON on stdout with the URL and the key files: key_file for everything,
    runner_key_file for runners, evaluator_key_file for programs that give rewards, live_key_file for agents in
    production. The servers of MODEL get LIGHTNING_UPSTREAM_KEY_MODEL (letters in upper case, other characters as _).
    With a single upstream, LIGHTNING_UPSTREAM_KEY also works. The provider gets LIGHTNING_PROVIDER_KEY.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.cli.servers.serving import check_place, key_files, opened_when_ready, serve_until_stopped
    from lightning_trainer.cli.servers.upstreams import read_provider
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.http.masking import remember_password
    from lightning_trainer.kits.deploy.serving import deploying
    from lightning_trainer.lineage.blocks import refuse_blocked
    from lightning_trainer.lineage.reading import resolve_checkpoint

    if adapters is not None:
        refuse_blocked(resolve_checkpoint(adapters), allowed=allow_blocked)
    forwarded = _upstreams(adapters, flags)
    if unrecorded and provider is None:
        raise ConfigError("--unrecorded applies to calls that go to --provider URL, which is not given.")
    elsewhere = read_provider(provider)
    for url in (store, provider or "", *(url for each in forwarded for url in (each.url, *each.replicas))):
        remember_password(url)
    settings = _settings(endpoint, [upstream.model for upstream in forwarded], flags)
    place = _place(endpoint, flags)
    check_place(place)
    with (
        opened_when_ready(store) as kept,
        key_files(key_file, "runner", "evaluator", "live", rotate=rotate_keys) as files,
    ):
        app = create_app(
            kept,
            keys=files.keys,
            upstreams=forwarded,
            provider=elsewhere,
            record_untrained=not unrecorded,
            **settings,
        )
        views = _add_view(app, store, flags["tokenizers"], flags["loops"])
        with deploying(app):
            serve_until_stopped(app, place, files, stopping=views.stopping.set)


def _upstreams(adapters: Path | None, flags: dict[str, Any]) -> Sequence[Upstream]:
    """Read the upstream servers."""
    from lightning_trainer.cli.servers.upstreams import read_upstreams

    return read_upstreams(
        flags["upstreams"],
        timeout_s=flags["upstream_timeout"],
        keys=flags["upstream_keys"],
        adapters=adapters,
        tokenizers=flags["tokenizers"],
        tool_formats=flags["tool_formats"],
        system_messages=flags["system_messages"],
    )


def _settings(endpoint: str | None, models: Sequence[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Read the settings of the gateway: routing, limits, and what it keeps of production spans."""
    from lightning_spans.record.production import Live, parse_rate
    from lightning_spans.record.redaction import read_rules
    from lightning_trainer.gateway.settings import parse_limits
    from lightning_trainer.naming import parse_rules

    return {
        "routing": _routing(flags["names"], flags["model"], models, endpoint, parse_rules(flags["name_by"])),
        "limits": parse_limits(flags["limits"]),
        "live": Live(rate=parse_rate(flags["live_sample"]), redaction=read_rules(flags["rules"], os.environ)),
    }


def _place(endpoint: str | None, flags: dict[str, Any]) -> ListenAddress:
    """Read the address where the server listens, and its TLS options."""
    from lightning_trainer.cli.servers.serving import ListenAddress

    known_as = (urlsplit(endpoint).hostname or "",) if endpoint else ()
    return ListenAddress(
        host=flags["host"],
        port=flags["port"],
        tls_cert=flags["tls_cert"],
        tls_key=flags["tls_key"],
        plain=flags["plain_http"],
        names=known_as,
    )


def _add_view(app: App, store: str, tokenizers: Sequence[str], loops: Path) -> Views:
    """Add the viewer's pages, which show the server's own store."""
    from lightning_trainer.kits.view.pages import add_view
    from lightning_trainer.kits.view.routes import Views
    from lightning_trainer.kits.view.runs import Runs

    views = Views(Runs(store=store), [Path(text.partition("=")[2]) for text in tokenizers], loops)
    add_view(app, views)
    return views


def _routing(
    names: str | None, model: str | None, models: Sequence[str], endpoint: str | None, rules: Sequence[NameRule]
) -> Routing:
    """Return which agents' calls go to which model."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.gateway.settings import Routing

    agents = split_names(names or "")
    if (agents or model) and not models:
        raise ConfigError("--agents needs a model that answers them. Name one with --upstream MODEL=URL.")
    if model is not None and model not in models:
        raise ConfigError(f"--model {model} is not an upstream. Use one of: {', '.join(models)}.")
    chosen = model or (models[0] if models else "policy")
    return Routing(agents=agents, model=chosen, endpoint=endpoint, name_by=tuple(rules))
