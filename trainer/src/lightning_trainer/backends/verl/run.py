"""`train()` on verl: opens store, gateway and runner here, starts verl beside them, and closes everything again."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_spans import plugins
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.store import Store
from lightning_trainer.backends.verl.describe import composed, count_steps, has_flash_attention
from lightning_trainer.backends.verl.overrides import DEFAULT_CONTEXT, Place, overrides
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.resuming import newest_checkpoint, note_identity
from lightning_trainer.backends.verl.shape import read_shape
from lightning_trainer.config import TrainConfig, to_json
from lightning_trainer.data import load_tasks
from lightning_trainer.folders import CONFIG_NAME, STORE_NAME, make_folder
from lightning_trainer.local import opened
from lightning_trainer.metrics import MetricLog, write_atomically
from lightning_trainer.progress import Progress, Silent
from lightning_trainer.runner import Runner
from lightning_trainer.target import Job

if TYPE_CHECKING:
    from lightning_trainer.training import Result

logger = logging.getLogger(__name__)
KEY_NAME: Final = "admin.key"
RUNNER_KEY_NAME: Final = "runner.key"  # for runners on other machines; it can claim and end rollouts, and no more
_LOOK_S: Final = 0.5
_END_S: Final = 60.0


def run(config: TrainConfig, progress: Progress | None = None) -> Result:
    """Train on verl; see `lightning_trainer.train`.

    verl can't be stopped between two steps: Ctrl-C ends it at once, and the run goes on from its last checkpoint.

    Raises:
        LightningError: an option, a file or the agent is wrong, there is nothing to learn, or a part of verl failed.
    """
    from lightning_trainer.training import Result

    began, progress = time.monotonic(), progress or Silent()
    _need_verl()
    if config.val is not None:
        load_tasks(config.val)
    steps = count_steps(config)
    checkpoint = newest_checkpoint(config) if config.resume else None
    plugins.load_all()
    with ExitStack() as stack:
        folder = checkpoint.parent.parent if checkpoint else make_folder(config.out)
        progress.phase("importing the agent")
        runner = stack.enter_context(_runner(config, folder))
        log = stack.enter_context(closing(MetricLog(folder, from_step=_step_of(checkpoint))))
        reporter = Reporter(log, progress)
        store = stack.enter_context(opened(config.store or str(folder / STORE_NAME)))
        place = Place(folder=folder.absolute(), steps=steps, resume=checkpoint and checkpoint.absolute())
        place = stack.enter_context(_serving(config, place, store, runner, reporter))
        write_atomically(folder / CONFIG_NAME, to_json(config.model_copy(update={"out": folder})).encode())
        note_identity(folder, config)
        progress.phase("starting verl and vLLM")
        _run_verl(config, place, runner)
        log.draw()
        newest = folder / "checkpoint"
        return Result(
            before=reporter.score_at(0),
            after=reporter.score_at(steps),
            curve=reporter.curve(steps),
            steps=steps,
            checkpoint=newest if newest.exists() else None,
            folder=folder,
            seconds=time.monotonic() - began,
        )


def _need_verl() -> None:
    for package in ("verl", "ray", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'{package} is not installed here. Run: pip install "lightning-trainer[verl]"')


@contextmanager
def _runner(config: TrainConfig, folder: Path) -> Iterator[Runner]:
    job = Job(target=config.target, command=config.command, reward=config.reward)
    runner = Runner(job, workers=config.worker_count(), concurrency=config.concurrency, logs=folder / "logs")
    runner.start()
    try:
        yield runner
    finally:
        runner.stop()


@contextmanager
def _serving(config: TrainConfig, place: Place, store: Store, runner: Runner, reporter: Reporter) -> Iterator[Place]:
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
    server = ServerThread(app, host=_host(config), port=config.port)
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


def _run_verl(config: TrainConfig, place: Place, runner: Runner) -> None:
    """Run verl's trainer to its end, and see meanwhile that the agents still run."""
    if config.device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported anywhere
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    values = overrides(config, place, read_shape(config.model), flash_attention=has_flash_attention())
    verls = composed(values)
    failure: list[BaseException] = []
    started = _Started()

    def work() -> None:
        from verl.trainer.main_ppo import run_ppo
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config

        try:
            validate_config(
                config=verls, use_reference_policy=need_reference_policy(verls), use_critic=need_critic(verls)
            )
            run_ppo(verls, task_runner_class=started)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failure.append(error)

    thread = threading.Thread(target=work, name="lightning-verl", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            runner.check()
    except BaseException:
        started.kill()  # Ray must not be shut down while a thread waits for it: it would crash this process
        thread.join(_END_S)
        raise
    finally:
        if not thread.is_alive():
            ray.shutdown()
    if failure:
        raise explained(failure[0], place) from failure[0]


class _Started:
    """Stands for the actor class that verl's `run_ppo` starts, and keeps hold of the actor."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._killed = False

    def remote(self) -> Any:
        """Start the actor."""
        from lightning_trainer.backends.verl.task_runner import TaskRunner

        if self._killed:
            raise LightningError("the run was stopped before verl had started")
        self._actor = TaskRunner.remote()
        return self._actor

    def kill(self) -> None:
        """End it, and with it all that it started."""
        import ray

        self._killed = True
        if self._actor is not None:
            ray.kill(self._actor)


def explained(error: BaseException, place: Place) -> BaseException:
    """Give the error that a user can read: ours, as it was raised in verl's process, or one about a part that died."""
    from ray.exceptions import RayActorError, RayTaskError

    inner: BaseException | None = error
    while isinstance(inner, RayTaskError):
        inner = inner.cause if isinstance(inner.cause, BaseException) else None
    if isinstance(inner, LightningError):
        return inner
    newest = place.folder / "checkpoint"
    onward = f" Go on with: lightning-rl train --resume {place.folder}" if newest.exists() else ""
    if isinstance(inner, RayActorError):
        return LightningError(f"a process of verl died: {str(inner)[:2000]}{onward}")
    return LightningError(f"verl failed: {str(error)[-4000:]}{onward}")


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("global_step_"))
