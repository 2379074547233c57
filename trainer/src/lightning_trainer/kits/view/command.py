"""`lightning-rl view`."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_trainer.flags.common import print_json, read_key, trust_option
from lightning_trainer.flags.files import (
    key_file_option,
    listen_options,
    loops_option,
    plain_http_option,
    server_flag,
    store_flag,
)

if TYPE_CHECKING:
    from lightning_trainer.kits.view.routes import Views
    from lightning_trainer.kits.view.runs import Runs

_RUNS: Final = Path("runs")
_KEY_S: Final = 10 * 86_400.0  # lifetime of a page's key


@click.command(name="view")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@store_flag("Store to show instead of a run: a path, sqlite:/// or postgresql://.")
@trust_option
@server_flag("URL of a `lightning-rl server`, which shows its own store.")
@key_file_option
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder with the model's tokenizer.json, if the run's own is not found. May be repeated.",
)
@loops_option
@listen_options()
@plain_http_option("The key")
@click.option(
    "--save-marks",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the marks to this file, one JSON object per line, and exit.",
)
@click.option("--open/--no-open", "opened", default=True, help="Open the page in a browser.")
def command(
    *,
    run: Path | None,
    store: str | None,
    trust: bool,
    server: str | None,
    key_file: Path | None,
    tokenizers: tuple[Path, ...],
    loops: Path,
    host: str,
    port: int,
    plain_http: bool,
    save_marks: Path | None,
    opened: bool,
) -> None:
    """Show a run in a web page: groups, rollouts, calls, tokens, credit.

    RUN is the folder of a run, or a folder that contains several. Default: runs/. The viewer writes nothing but marks,
    so it can show a run that is training. One line of JSON on stdout has the address of the page, which contains its
    key.
    """
    from lightning_spans.errors import ConfigError
    from lightning_trainer.kits.view.routes import Views
    from lightning_trainer.kits.view.runs import Runs
    from lightning_trainer.report.terminal import printable

    if sum(each is not None for each in (run, store, server)) > 1:
        raise ConfigError("give one of RUN, --store and --server.")
    if server is not None:
        _show(_page_of(server, read_key(key_file)), opened=opened)
        return
    if store is not None and store.startswith(("http://", "https://")):
        raise ConfigError(f"{store} is a server: --server {store}.")
    runs = Runs(store=store) if store is not None else Runs(run or _RUNS, trusted=trust)
    for each in runs.all():  # raises if there is none
        if each.is_elsewhere:
            told = f"{each.name} names a store outside of its folder, which is not opened. If it is yours: --trust."
            click.echo(printable(told), err=True)
    if save_marks is not None:
        _save_marks(runs, save_marks)
        return
    _serve(Views(runs, tokenizers, loops), host, port, plain=plain_http, opened=opened)


def _save_marks(runs: Runs, file: Path) -> None:
    """Write the marks of all runs, each with its run and its whole task."""
    from contextlib import closing

    from lightning_trainer.kits.view.marks import exported_marks
    from lightning_trainer.kits.view.reader import StoreReader
    from lightning_trainer.report.metrics import write_atomically

    lines: list[str] = []
    for run in runs.all():
        if run.folder is None or run.has_store:
            with closing(StoreReader(run.store)) as reader:
                lines += [json.dumps({"run": run.name, **mark}) for mark in exported_marks(reader, run)]
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    print_json({"marks": len(lines), "file": str(file)})


def _serve(views: Views, host: str, port: int, *, plain: bool, opened: bool) -> None:
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.gateway.http.serving import ServerThread
    from lightning_trainer.kits.view.pages import PATH, create_view
    from lightning_trainer.kits.view.reader import StoreReader

    found = views.runs.all()
    if len(found) == 1 and (found[0].folder is None or found[0].has_store):
        StoreReader(found[0].store).close()  # raises if it cannot be read
    keys = Keys.fresh()
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with ServerThread(create_view(views, keys), host, port, plain=plain) as server:
        _show(f"{server.url}{PATH}#key={keys.issue('viewer', expires_s=_KEY_S)}", opened=opened)
        asked.wait()
        views.stopping.set()


def _page_of(server: str, key: str | None) -> str:
    """Return the address of a server's page, after checking that it answers.

    Raises:
        ConfigError: it does not answer, or has no pages.
    """
    import httpx

    from lightning_spans.errors import ConfigError
    from lightning_trainer.gateway.auth.keys import scope_of
    from lightning_trainer.kits.view.pages import PATH

    if key is not None and scope_of(key) != "viewer":
        raise ConfigError(
            "a browser gets a key that opens the viewer and nothing else, and this key opens more. Where the server's"
            " secret is, make one: lightning-rl key viewer > lightning.key.viewer. Then pass it with --key-file."
        )
    url = f"{server.rstrip('/')}{PATH}"
    try:
        answer = httpx.get(url, timeout=10.0)
    except httpx.HTTPError as error:
        raise ConfigError(f"{server} does not answer: {error}.") from None
    if answer.status_code != httpx.codes.OK:
        raise ConfigError(f"{server} has no viewer: it answered {answer.status_code}.")
    return f"{url}#key={key}" if key else url


def _show(url: str, *, opened: bool) -> None:
    print_json({"url": url})
    if opened:
        import webbrowser

        webbrowser.open(_private_page(url).as_uri())


def _private_page(url: str) -> Path:
    """Write a page that redirects to an address and that only this user can read; return its path.

    The address contains a key, and every user of the machine can read the command line of a browser.
    """
    from platformdirs import user_runtime_path

    from lightning_trainer.gateway.auth.register import write_private

    page = user_runtime_path("lightning-rl") / "view.html"
    target = json.dumps(url).replace("<", "\\u003c")
    write_private(page, f"<!doctype html><title>Lightning-RL</title><script>location.replace({target})</script>")
    return page
