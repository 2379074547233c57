"""`lightning-rl runner`."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_trainer.flags.common import print_json, read_key
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import key_file_flag, server_flag
from lightning_trainer.flags.program import isolate_option, program_options, take_work, work_options, workers_option
from lightning_trainer.options.limits import LimitOptions
from lightning_trainer.options.record import split_names

if TYPE_CHECKING:
    from lightning_spans.store.http import HttpStore
    from lightning_trainer.runner.runner import Runner
    from lightning_trainer.runner.target import Job
    from lightning_trainer.runner.worker.limits import WorkerLimits
    from lightning_trainer.runner.workers import Start


@click.command(name="runner")
@click.argument("target", required=False)
@server_flag("URL of the server, without /v1.", dest="url", required=True)
@key_file_flag("File with the runner key. Default: LIGHTNING_KEY.")
@program_options()
@work_options
@workers_option
@field_option(LimitOptions, "concurrency", filled=True)
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds to wait for running rollouts after the first signal; a second signal ends them at once.",
)
@click.option(
    "--lease-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1, 86_400),
    help="Seconds without a heartbeat after which a runner counts as dead and its rollouts run again.",
)
@click.option(
    "--pass-env",
    "passed",
    multiple=True,
    metavar="NAME,...",
    help="Environment variables to pass to the agent in addition to the usual ones (PATH, HOME,"
    " ...); globs such as MYAPP_* work. May be repeated.",
)
@isolate_option
@click.option(
    "--isolate-users",
    "users",
    metavar="FIRST-LAST",
    help="Run the process of each attempt under its own user id from this range, which no other"
    " user may have (Linux, as root).",
)
@click.option(
    "--ray", "on_ray", is_flag=True, help="Run the workers as actors of a Ray cluster. Default: one per core."
)
@click.option(
    "--ray-address", metavar="ADDRESS", help="Address of the cluster; local starts one here. Default: RAY_ADDRESS."
)
@click.option("--ray-cpus", default=1.0, show_default=True, type=click.FloatRange(0), help="Cores per actor.")
@click.option("--ray-env", metavar="JSON", help='Ray runtime_env of the actors, such as {"working_dir": "."}.')
@click.option("--worker-memory", metavar="SIZE", help="Memory limit of each worker process, such as 2GiB (Linux).")
@click.option("--worker-cores", type=click.IntRange(1), help="CPU cores per worker (Linux).")
@click.option(
    "--logs",
    default="lightning-logs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for the output of the agents.",
)
def command(*, url: str, key_file: Path | None, drain_s: float, **flags: Any) -> None:
    """Claim rollouts from a server and run the program TARGET (module:function) on them, until Ctrl-C or SIGTERM.

    When it is ready, it prints one line of JSON on stdout. Start one on each machine. After the first signal it claims
    no more rollouts and waits --drain-s seconds for those that are running. Unfinished rollouts then return to the
    queue, without using up an attempt.
    """
    from lightning_trainer.cli.processes import handed_over
    from lightning_trainer.runner.own_users import check_key_file
    from lightning_trainer.runner.target import Job

    _refuse_contradictions(flags)
    handed = handed_over()
    if (path := handed.get("key_file")) is not None:
        key_file = Path(path)
    key = _checked_key(url, key_file, handed.get("key"))
    isolated = bool(flags["isolate"]) or flags["users"] is not None
    work = take_work(flags)
    withheld = tuple(str(path.absolute()) for path in (key_file, flags["logs"]) if path is not None)
    job = Job(
        target=flags["target"],
        command=flags["program"],
        reward=flags["reward"],
        work=work,
        isolate=isolated,
        withheld=withheld,
    )
    if flags["users"] is not None and key_file is not None:
        check_key_file(key_file)
    runner, workers = _make_runner(job, flags)
    with closing(_store(url, key, key_file)) as store:
        _work_until_stopped(runner, store, {"server": url, "workers": workers}, drain_s)


def _refuse_contradictions(flags: dict[str, Any]) -> None:
    """Reject options that contradict each other.

    Raises:
        ConfigError: names the options, and what to do.
    """
    from lightning_trainer.config.mistakes import refuse

    on_ray = flags["on_ray"]
    refuse(
        {
            "name the agent: a TARGET module:function, or --command, and not both.": (
                (flags["target"] is None) == (flags["program"] is None)
            ),
            "--isolate gives run and score the main thread of a process, which an actor of"
            " --ray does not have. Leave out --isolate, or start a runner with --isolate and without --ray on each"
            " machine.": bool(on_ray and flags["isolate"]),
            "--isolate-users applies to processes on this machine, and --ray starts none here.": bool(
                on_ray and flags["users"] is not None
            ),
            "--ray-address and --ray-env are options of --ray. Add --ray.": bool(
                not on_ray and (flags["ray_address"] or flags["ray_env"])
            ),
        }
    )


def _make_runner(job: Job, flags: dict[str, Any]) -> tuple[Runner, int]:
    """Return the runner and its number of workers."""
    from lightning_trainer.config.workers import cores
    from lightning_trainer.runner.environment import allowed_environment
    from lightning_trainer.runner.own_users import parse_users
    from lightning_trainer.runner.runner import Runner
    from lightning_trainer.runner.worker.limits import WorkerLimits, parse_bytes

    memory, users = flags["worker_memory"], flags["users"]
    limits = WorkerLimits(memory_bytes=parse_bytes(memory) if memory else None, cores=flags["worker_cores"])
    workers, start = flags["workers"], None
    if flags["on_ray"]:
        workers, start = _ray(
            job,
            flags["concurrency"],
            limits=limits,
            workers=workers,
            address=flags["ray_address"],
            cpus=flags["ray_cpus"],
            env=flags["ray_env"],
        )
    count = workers or cores()
    names = [name for one in flags["passed"] for name in split_names(one)]
    runner = Runner(
        job,
        workers=count,
        concurrency=flags["concurrency"],
        logs=flags["logs"],
        lease_s=flags["lease_s"],
        limits=limits,
        environment=allowed_environment(os.environ, names),
        users=None if users is None else parse_users(users),
        start=start,
    )
    return runner, count


def _store(url: str, key: str, key_file: Path | None) -> HttpStore:
    """Open the server's store with the key that the file currently contains."""
    from lightning_spans.store.http import HttpStore
    from lightning_trainer.runner.key_file import KeyFromFile

    return HttpStore(url, key=key, auth=None if key_file is None else KeyFromFile(key_file))


def _checked_key(url: str, key_file: Path | None, key: str | None) -> str:
    """Return the key after checking that the server is reachable and accepts it."""
    from lightning_spans.errors import ConfigError, StoreError
    from lightning_spans.store.http import HttpStore

    key = read_key(key_file) if key_file is not None or key is None else key
    if key is None:
        raise ConfigError("a runner needs a key: --key-file FILE. The server names the file in its first line.")
    with closing(HttpStore(url, key=key, patience_s=5.0)) as probe:
        try:
            probe.heartbeat([])
        except StoreError as error:
            raise ConfigError(f"server {url}: {error}. Check --server and --key-file.") from None
    return key


def _work_until_stopped(runner: Runner, store: HttpStore, facts: dict[str, Any], drain_s: float) -> None:
    """Work until a first signal, then let rollouts finish for up to `drain_s` seconds or until a second signal."""
    asked, again = threading.Event(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets its own handlers
        signal.signal(number, lambda *_: (again if asked.is_set() else asked).set())
    try:
        runner.start()
        runner.serve(store)
        print_json({"runner": runner.name, **facts})
        while not asked.wait(0.5) and runner.alive:
            pass
        runner.drain(drain_s)
        while not again.wait(0.1) and runner.alive:
            pass
        runner.stop()
        runner.check()
    finally:
        runner.stop()


def _ray(
    job: Job,
    concurrency: int,
    *,
    limits: WorkerLimits,
    workers: int | None,
    address: str | None,
    cpus: float,
    env: str | None,
) -> tuple[int, Start]:
    """Join the cluster, and return the number of workers and the function that starts one there."""
    from lightning_spans.errors import ConfigError
    from lightning_trainer.runner.ray import Placement, RayWorker, connect

    try:
        environment: Any = json.loads(env) if env else {}
    except ValueError:
        environment = None
    if not isinstance(environment, dict):
        raise ConfigError(f"""--ray-env {env!r}: give a JSON object, such as '{{"working_dir": "."}}'.""")
    cores = connect(address)
    placement = Placement(cpus=cpus, memory_bytes=limits.memory_bytes, environment=environment)

    async def start(number: int) -> RayWorker:
        return await RayWorker.start(job, concurrency, number=number, limits=limits, placement=placement)

    return workers or max(1, int(cores / cpus) if cpus else cores), start
