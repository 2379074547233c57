"""The servers in the user's own process: store, gateway over vLLM's replicas, routes for verl's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lightning_trainer.backend_protocol import OpenRun
from lightning_trainer.backends.verl.options.adapters import sends_adapters
from lightning_trainer.backends.verl.options.overrides import DEFAULT_CONTEXT, Site, flatten
from lightning_trainer.backends.verl.options.profiles import LOGPROBS_MODE, logprobs_mode
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.run_tokenizer import open_tokenizer
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.gateway.prompt.template import check_calls
from lightning_trainer.gateway.upstream.token_protocols import ADJUSTING
from lightning_trainer.models.shape import read_shape
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import LOOPBACK, serve

KEY_NAME: Final = "admin.key"
RUNNER_KEY_NAME: Final = "runner.key"  # for runners on other machines; it can only claim and end rollouts


@contextmanager
def serving(run: OpenRun, reporter: Reporter) -> Iterator[Site]:
    """Serve the store and the gateway, with the routes for verl's process; yield what that process must know."""
    from lightning_trainer.backends.verl.control import RunServerClient, add_routes, judging_by
    from lightning_trainer.backends.verl.engine import VllmEngine
    from lightning_trainer.gateway.auth.keys import RUN_S, Keys
    from lightning_trainer.gateway.auth.register import write_private

    # verl trains with one temperature for all calls.
    config = run.config.model_copy(update={"temperature": run.config.temperature or 1.0})
    shape = read_shape(config.model)
    context = config.max_model_len or (shape.context if shape else DEFAULT_CONTEXT)
    folder, keys = run.folder.absolute(), Keys.fresh()
    tokenizer = open_tokenizer(config, folder)
    check_calls(tokenizer, config.tool_format)
    engine = VllmEngine(
        tokenizer,
        context,
        abilities=abilities_of(config),
        tool_format=config.tool_format,
        adapter=sends_adapters(config.lora_rank, dict(flatten(config.verl))),
    )
    with serve(
        run.store,
        run.runner,
        AnswerSource.of((engine,), config.policies),
        sampling_of(config),
        port=config.port,
        host=_host(config),  # traffic between the nodes of a Ray cluster, including Ray's own, is not encrypted
        keys=keys,
        timeouts=config.timeouts,
        failed=config.failed,
        extend=lambda app: add_routes(app, engine, reporter.told, judging_by(run.judge, run.store, config.timeouts)),
    ) as served:
        write_private(folder / KEY_NAME, keys.issue("admin", expires_s=RUN_S))
        write_private(folder / RUNNER_KEY_NAME, keys.issue("runner", expires_s=RUN_S))
        try:
            yield Site(
                folder=folder,
                url=served.url,
                key_file=folder / KEY_NAME,
                steps=run.steps,
                resume=run.start.checkpoint and run.start.checkpoint.absolute(),
            )
        finally:
            run.runner.stop()  # before its agents' calls lose the engine
            RunServerClient(served.url, keys.issue("admin", expires_s=RUN_S)).end()
            for name in (KEY_NAME, RUNNER_KEY_NAME):
                (folder / name).unlink(missing_ok=True)


def abilities_of(config: TrainConfig) -> frozenset[str]:
    """Return what vLLM supports while recorded log-probabilities are the policy's own, as the trainer computes them.

    They are the policy's own if they are taken before penalties and biases. Grammars are left out: in every mode, vLLM
    takes log-probabilities after a grammar's mask. An answer that continues with new weights forgets which tokens it
    already has.
    """
    if dict(flatten(config.verl)).get(LOGPROBS_MODE, logprobs_mode(config)) != "raw_logprobs":
        return frozenset()
    return ADJUSTING if config.staleness == 0 else ADJUSTING - {"presence_penalty", "frequency_penalty"}


def _host(config: TrainConfig) -> str:
    """Return the host: loopback on one machine, the address that other nodes reach on several."""
    if config.nodes == 1:
        return LOOPBACK
    import ray.util

    return str(ray.util.get_node_ip_address())
