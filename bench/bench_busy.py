"""One update on free cores and beside a busy loop for each core, a thread for each core or ``auto``, in turns.

BENCH_ROWS (64) is the number of rows, BENCH_ROUNDS (3) that of turns, BENCH_DTYPE (auto) the format of the weights,
BENCH_MODEL the model. `python bench/bench_busy.py` prints every update besides.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from bench_update import time_update
from figures import Figure, choose_size
from model import model_folder

LOOP = "import time\nend = time.monotonic() + 900\nwhile time.monotonic() < end: pass"  # should it outlive us


def measure() -> list[Figure]:
    from training_rows import make
    from transformers import AutoTokenizer

    from lightning_trainer.backends.torch.learner import TorchLearner
    from lightning_trainer.backends.torch.threads import available_cores

    model, cores = model_folder(), available_cores()
    rows = make(AutoTokenizer.from_pretrained(model))[: int(os.environ.get("BENCH_ROWS", choose_size("64", "4")))]
    backend = TorchLearner(model, dtype=os.environ.get("BENCH_DTYPE", "auto"), learning_rate=1e-5)
    steps: dict[tuple[int, int | str], list[dict[str, float]]] = defaultdict(list)
    backend.update(rows)  # makes the optimiser's state
    for _ in range(int(os.environ.get("BENCH_ROUNDS", choose_size("3", "1")))):
        for loops in (0, cores):
            for threads in (cores, "auto"):
                backend.options = backend.options.with_values(threads=threads)
                with busy(loops):
                    step = time_update(backend, rows)
                steps[loops, threads].append(step)
                took = f"wall {step['wall']:.1f} s, CPU {step['cpu']:.1f} s, {step['update_threads']:.0f} threads"
                print(f"{loops} loops, threads = {threads}: {took}", file=sys.stderr, flush=True)
    backend.close()
    return figures(steps, cores)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def figures(steps: dict[tuple[int, int | str], list[dict[str, float]]], cores: int) -> list[Figure]:
    middle = {
        case: {clock: statistics.median(step[clock] for step in found) for clock in ("wall", "cpu")}
        for case, found in steps.items()
    }
    found = [
        Figure(
            what=f"update, {loops or 'no'} busy loops, threads = {threads}",
            value=seconds["wall"],
            unit="s",
            note=f"wall; {seconds['cpu']:.1f} s CPU",
        )
        for (loops, threads), seconds in middle.items()
    ]
    slower = middle[cores, "auto"]["wall"] / middle[0, "auto"]["wall"]
    return [*found, Figure(what="update beside busy loops over free", value=slower, unit="x", goal=3)]


if __name__ == "__main__":
    for figure in measure():
        print(figure.what, f"{figure.value:.2f}", figure.unit, figure.note)
