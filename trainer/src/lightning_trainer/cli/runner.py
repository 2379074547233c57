"""`lightning-rl runner`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from lightning_trainer.cli.options import print_json, read_key


@click.command(name="runner")
@click.argument("target", required=False)
@click.option("--server", "url", required=True, metavar="URL", help="The server's URL, without /v1.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the runners' key; else LIGHTNING_KEY.")
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result).")
@click.option("--workers", type=click.IntRange(1), help="Worker processes; as many as there are cores by default.")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1), help="Rollouts at once in each.")
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that rollouts get to end when it is stopped; a second signal ends them at once.",
)
@click.option("--worker-memory", metavar="SIZE", help="Most memory of each worker process, such as 2GiB (Linux).")
@click.option("--worker-cores", type=click.IntRange(1), help="Processor cores that each worker may use (Linux).")
@click.option(
    "--logs",
    default="lightning-logs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for what the agents print.",
)
def command(
    *,
    target: str | None,
    url: str,
    key_file: Path | None,
    program: str | None,
    reward: str | None,
    workers: int | None,
    concurrency: int,
    drain_s: float,
    worker_memory: str | None,
    worker_cores: int | None,
    logs: Path,
) -> None:
    """Claim rollouts from a server and run the program TARGET (module:function) on them, until Ctrl-C or SIGTERM.

    When it is ready, it says so in one line of JSON on stdout. Run it on as many machines as you like. Once stopped it
    claims no more, and lets what runs go on for a while; what has not ended then goes back to the queue, without
    using up a try.
    """
    from lightning_spans.errors import ConfigError, StoreError
    from lightning_spans.store_http import HttpStore
    from lightning_trainer.config import cores
    from lightning_trainer.limits import Limits, parse_bytes
    from lightning_trainer.runner import Runner
    from lightning_trainer.target import Job

    if (target is None) == (program is None):
        raise ConfigError("name the agent: a TARGET module:function, or --command, and not both.")
    key = read_key(key_file)
    if key is None:
        raise ConfigError("a runner needs a key: --key-file FILE. The server names the file in its first line.")
    limits = Limits(memory_bytes=parse_bytes(worker_memory) if worker_memory else None, cores=worker_cores)
    asked, again = threading.Event(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: (again if asked.is_set() else asked).set())
    probe = HttpStore(url, key=key, patience_s=5.0)
    try:
        probe.heartbeat([])
    except StoreError as error:
        raise ConfigError(f"server {url}: {error}. Check --server and --key-file.") from None
    finally:
        probe.close()
    job = Job(target=target, command=program, reward=reward)
    runner = Runner(job, workers=workers or cores(), concurrency=concurrency, logs=logs, limits=limits)
    store = HttpStore(url, key=key)
    try:
        runner.start()
        runner.serve(store)
        print_json({"runner": runner.name, "server": url, "workers": workers or cores()})
        while not asked.wait(0.5) and runner.alive:
            pass
        runner.drain(drain_s)
        while not again.wait(0.1) and runner.alive:
            pass
        runner.stop()
        runner.check()
    finally:
        runner.stop()
        store.close()
