"""What the user's own process serves beside verl: store, gateway over vLLM's replicas, routes for verl's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.store import Store
from lightning_trainer.backends.verl.overrides import DEFAULT_CONTEXT, Place
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.shape import read_shape
from lightning_trainer.config import TrainConfig
from lightning_trainer.runner import Runner

KEY_NAME: Final = "admin.key"
RUNNER_KEY_NAME: Final = "runner.key"  # for runners on other machines; it can claim and end rollouts, and no more


@contextmanager
def serving(config: TrainConfig, place: Place, store: Store, runner: Runner, reporter: Reporter) -> Iterator[Place]:
    """Serve the store and the gateway, with the routes for verl's process; gives the place with URL and key."""
    from lightning_spans.store_http import HttpStore
    from lightning_trainer.backends.verl.control import Control, add_routes
    from lightning_trainer.backends.verl.engine import VllmEngine
    from lightning_trainer.server.app import create_app
    from lightning_trainer.server.keys import Keys, write_private
    from lightning_trainer.server.serving import ServerThread
    from lightning_trainer.server.settings import Routing
    from lightning_trainer.training import UNNAMED

    shape = read_shape(config.model)
    context = config.max_model_len or (shape.context if shape else DEFAULT_CONTEXT)
    engine = VllmEngine(tokenizer_of(config), context)
    routing = Routing(
        agents=config.agents if config.agents is not None else ("*",),
        model=engine.model,
        seed=config.seed,
        temperature=config.temperature or 1.0,
        max_tokens=config.max_tokens,
        unnamed=UNNAMED if config.command is not None else None,
    )
    keys = Keys.fresh()
    app = create_app(store, keys=keys, engine=engine, routing=routing)
    add_routes(app, engine, reporter.told)
    # Between the nodes of a Ray cluster nothing is encrypted, Ray's own traffic neither.
    server = ServerThread(app, host=_host(config), port=config.port, plain=config.nodes > 1)
    url = server.start()
    key_file = place.folder / KEY_NAME
    write_private(key_file, keys.issue("admin"))
    write_private(place.folder / RUNNER_KEY_NAME, keys.issue("runner"))
    claims = HttpStore(url, key=keys.issue("runner"))
    try:
        runner.serve(claims)
        yield Place(folder=place.folder, url=url, key_file=key_file, steps=place.steps, resume=place.resume)
    finally:
        runner.stop()
        claims.close()
        Control(url, keys.issue("admin")).end()
        server.stop()
        for name in (KEY_NAME, RUNNER_KEY_NAME):
            (place.folder / name).unlink(missing_ok=True)


def _host(config: TrainConfig) -> str:
    """Loopback on one machine; the address that other nodes reach, on several."""
    if config.nodes == 1:
        return "127.0.0.1"
    import ray.util

    return str(ray.util.get_node_ip_address())


def tokenizer_of(config: TrainConfig) -> Any:
    """Load the model's tokenizer, with the chat template that the run names.

    Raises:
        ConfigError: the model has no tokenizer or no template, or the template can't be read.
    """
    from importlib.resources import files

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model}: its tokenizer can't be loaded: {error}") from None
    if config.chat_template == "hermes":
        tokenizer.chat_template = (files("lightning_trainer") / "templates" / "hermes.jinja").read_text("utf-8")
    elif config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"chat template {config.chat_template}: {error.strerror}.") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"{config.model} has no chat template. Name a Jinja file for it, or `hermes` for ours.")
    return tokenizer
