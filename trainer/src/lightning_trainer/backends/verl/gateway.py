"""What the user's own process serves beside verl: store, gateway over vLLM's replicas, routes for verl's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lightning_spans.store import Store
from lightning_trainer.backends.tokenizers import load_tokenizer
from lightning_trainer.backends.verl.overrides import DEFAULT_CONTEXT, Place, flatten
from lightning_trainer.backends.verl.profiles import LOGPROBS_MODE, logprobs_mode
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.shape import read_shape
from lightning_trainer.config import TrainConfig
from lightning_trainer.runner import Runner
from lightning_trainer.server.token_wires import ADJUSTING

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
    engine = VllmEngine(load_tokenizer(config.model, config.chat_template), context, abilities=abilities_of(config))
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


def abilities_of(config: TrainConfig) -> frozenset[str]:
    """Name what vLLM does with log-probabilities on record that are the policy's own, as the trainer computes them.

    They are where they are taken before penalties and biases. Grammars are left out: vLLM takes log-probabilities after
    a grammar's mask whatever its mode. An answer that goes on with new weights forgets which tokens it has already.
    """
    if dict(flatten(config.verl)).get(LOGPROBS_MODE, logprobs_mode(config)) != "raw_logprobs":
        return frozenset()
    return ADJUSTING if config.staleness == 0 else ADJUSTING - {"presence_penalty", "frequency_penalty"}


def _host(config: TrainConfig) -> str:
    """Loopback on one machine; the address that other nodes reach, on several."""
    if config.nodes == 1:
        return "127.0.0.1"
    import ray.util

    return str(ray.util.get_node_ip_address())
