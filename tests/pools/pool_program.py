"""A program whose model calls are tasks of a pool of processes: `pool_program.py KIND`, in an attempt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if "gevent" in sys.argv[1:]:
    from gevent import monkey

    monkey.patch_all()

import openai

from lightning_spans import Attempt, agent, attach, use_attempt

TASKS = range(3)


def ask(number):
    """Call the model as an agent; attached where the task runs, as a program's module does."""
    attach("openai", store="pool.db")
    with agent("writer"):
        client = openai.OpenAI(base_url=os.environ["POOL_URL"], api_key="k", max_retries=0)
        messages = [{"role": "user", "content": f"hello {number}"}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content


def in_joblib():
    from joblib import Parallel, delayed

    return Parallel(n_jobs=2)(delayed(ask)(number) for number in TASKS)


def in_dask():
    from dask.distributed import Client, LocalCluster

    cluster = LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None)
    with cluster, Client(cluster) as client:
        return client.gather([client.submit(ask, number) for number in TASKS])


def in_ray():
    import ray

    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    return ray.get([ray.remote(ask).remote(number) for number in TASKS])


def in_celery():
    worker = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "pool_program",
        "worker",
        "-c",
        "1",
        "-l",
        "error",
        "--without-mingle",
    ]
    with subprocess.Popen([*worker, "--without-gossip", "--without-heartbeat"]) as process:
        try:
            return [result.get(timeout=100) for result in [celery_app().tasks["ask"].delay(n) for n in TASKS]]
        finally:
            process.terminate()


def celery_app():
    """Return an app whose broker and results are folders."""
    from celery import Celery

    for name in ("queue", "results", "done"):
        Path(name).mkdir(exist_ok=True)
    app = Celery("pool", broker="filesystem://", backend=f"file://{Path('results').absolute()}")
    folders = {"data_folder_in": "queue", "data_folder_out": "queue", "processed_folder": "done"}
    app.conf.broker_transport_options = {**folders, "control_folder": "queue"}
    app.task(name="ask")(ask)
    return app


def in_gevent():
    """Fork a child whose threads are greenlets: the parent's live on in it."""
    ask("parent")
    child = os.fork()
    if child == 0:
        ask("child")
        sys.stdout.flush()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    live = attach("openai", store="pool.db")
    kind = sys.argv[1]
    import pool_program  # so that a task is found by its module's name

    with use_attempt(Attempt("r", "a")):
        print(getattr(pool_program, f"in_{kind}")())
elif "celery" in sys.argv[0]:
    app = celery_app()
