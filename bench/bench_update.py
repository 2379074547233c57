"""One GRPO update on 64 rows, beside TRL 1.16 on the same rows, the same model and the same cores, in turns.

TRL lives in an environment of its own: BENCH_TRL_PYTHON names its Python (`nox -s bench` sets it; by hand:
``uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 torch==2.13.0``). Without it only ours is measured.
BENCH_TRL, "DTYPE MICRO_BATCH", chooses how TRL runs; the default is what was fastest here of bfloat16 and float32
weights (the latter with TRL's own bf16 autocast) with 4, 8, 16 and 32 rows a micro-batch. No KL, no gradient
checkpointing, fused AdamW, no log-probabilities computed beforehand: TRL's most favourable settings.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from figures import Figure, choose_size
from model import model_folder

from lightning_trainer.rl.rows import Row

STEPS = choose_size(2, 1)
TRL = "bfloat16 8"
OTHERS = "42 s (TRL, two cores)"


class Peer:
    """TRL's process, which takes a step when told to."""

    def __init__(self, python: str, model: Path, rows: list[Row], folder: Path) -> None:
        np.savez(
            folder / "rows.npz",
            tokens=np.concatenate([row.tokens for row in rows]),
            mask=np.concatenate([row.mask for row in rows]),
            lengths=[len(row.tokens) for row in rows],
            advantages=[row.advantages[row.mask][0] for row in rows],
        )
        settings = os.environ.get("BENCH_TRL", TRL).split()
        files = [str(model), str(folder / "rows.npz"), str(folder / "logprobs.npy")]
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("trl_step.py")), *files, *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        self.logprobs = np.load(folder / "logprobs.npy")

    def step(self) -> dict[str, float]:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return dict(zip(("wall", "cpu", "grad_norm"), map(float, self._answer().split()), strict=True))

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"TRL's process ended with status {self._process.wait()}; its error is above")
        return line

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure() -> list[Figure]:
    from training_rows import make
    from transformers import AutoTokenizer

    model = Path(model_folder())
    rows = make(AutoTokenizer.from_pretrained(model))[: choose_size(64, 4)]
    python = os.environ.get("BENCH_TRL_PYTHON")
    with tempfile.TemporaryDirectory() as folder:
        if not python:
            return ours_alone(model, rows)
        with Peer(python, model, rows, Path(folder)) as peer:
            return side_by_side(model, with_logprobs(rows, peer.logprobs), peer)


def with_logprobs(rows: list[Row], logprobs: np.ndarray) -> list[Row]:
    """Put recorded log-probabilities into rows."""
    found, start = [], 0
    for row in rows:
        own = np.zeros_like(row.logprobs)
        own[row.mask] = logprobs[start : start + row.mask.sum()]
        start += row.mask.sum()
        found.append(replace(row, logprobs=own))
    return found


def side_by_side(model: Path, rows: list[Row], peer: Peer) -> list[Figure]:
    """Ours and TRL's steps in turns; ours also on the same rows made to share nothing, which is the same to TRL."""
    from lightning_trainer.backends.torch.learner import TorchLearner

    backend, apart = TorchLearner(model, learning_rate=1e-5), without_prefixes(rows)
    ours, alone, theirs = [], [], []
    for _ in range(STEPS + 1):
        ours.append(time_update(backend, rows))
        theirs.append(peer.step())
        alone.append(time_update(backend, apart))
    backend.close()
    mine, its, mine_apart = typical(ours), typical(theirs), typical(alone)
    same = f"gradient norm of the first step: ours {ours[0]['grad_norm']:.2f}, TRL's {theirs[0]['grad_norm']:.2f}"
    return [
        *figures(rows, mine),
        Figure(what="update, rows that share nothing", value=mine_apart["wall"], unit="s", note="wall; as many tokens"),
        Figure(what="TRL 1.16, the same 64 rows", value=its["wall"], unit="s", note=f"wall; {same}"),
        Figure(what="TRL 1.16, the same 64 rows, CPU", value=its["cpu"], unit="s CPU"),
        Figure(
            what="TRL's time over ours",
            value=its["wall"] / mine["wall"],
            unit="x",
            goal=2.5,
            more_is_better=True,
            note=f"median of {STEPS} steps each, in turns; by CPU {its['cpu'] / mine['cpu']:.2f}x",
        ),
        Figure(
            what="TRL's time over ours, rows that share nothing",
            value=its["wall"] / mine_apart["wall"],
            unit="x",
            note=f"by CPU {its['cpu'] / mine_apart['cpu']:.2f}x",
        ),
    ]


def without_prefixes(rows: list[Row]) -> list[Row]:
    """The same rows, each with a first token of its own: no two share a prefix."""
    return [
        replace(row, tokens=np.concatenate([[1_000 + r], row.tokens[1:]], dtype=np.int32)) for r, row in enumerate(rows)
    ]


def ours_alone(model: Path, rows: list[Row]) -> list[Figure]:
    from lightning_trainer.backends.torch.learner import TorchLearner

    backend = TorchLearner(model, learning_rate=1e-5)
    mine = typical([time_update(backend, rows) for _ in range(STEPS + 1)])
    backend.close()
    return figures(rows, mine, note="; TRL was not measured: set BENCH_TRL_PYTHON")


def typical(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds, without the first step, which makes the optimiser's state."""
    return {clock: statistics.median(step[clock] for step in steps[1:]) for clock in ("wall", "cpu")}


def figures(rows: list[Row], mine: dict[str, float], note: str = "") -> list[Figure]:
    tokens, trained = sum(len(row.tokens) for row in rows), sum(int(row.mask.sum()) for row in rows)
    how = f"SmolLM2-135M bf16, {tokens} tokens, {trained} trained"
    rate = tokens / mine["cpu"]
    return [
        Figure(what="update, 64 rows", value=mine["wall"], unit="s", others=OTHERS, note=f"wall; {how}{note}"),
        Figure(what="update, 64 rows, CPU", value=mine["cpu"], unit="s CPU", note="all cores"),
        Figure(what="training throughput", value=rate, unit="tokens/s", note="the rows' tokens, a second of CPU"),
    ]


def time_update(backend: object, rows: list[Row]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = backend.update(rows)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "grad_norm": metrics["grad_norm"],
        "update_threads": metrics["update_threads"],
    }
