"""Train the calculator's agents on one accelerator with each backend, and say where the time goes.

    python tests/gpu/measure.py [--device cuda] [--backends torch,verl] [--steps 14] [--model smollm2-135m] [--out DIR]

`nox -s gpu` runs it; `nox -s gpu -- --backends torch` needs, and installs, neither verl nor vLLM. With verl among the
backends, a run of a program with one call is then given to verl's own trainer
again, row by row (`replay.py`): the difference of what both need for a step, without sampling, is what we add.
Tables go to the screen and to DIR/report.md, which names machine and versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "examples" / "calculator"
PACKAGES = ("torch", "transformers", "verl", "vllm", "ray", "flash-attn")
# What a step consists of, by the names of metrics.jsonl.
PARTS = {
    "rollouts": "rollout_seconds",
    "log-probabilities": "logprob_seconds",
    "update": "update_seconds",
    "weight sync": "weights_seconds",
}
PLAIN = {"seconds": "timing_s/step", "rollout_seconds": "timing_s/gen", "save_seconds": "timing_s/save_checkpoint"}


class Memory:
    """The most memory in use on the device while it is watched, in GiB."""

    def __init__(self, device: str) -> None:
        self._cuda, self.peak, self._over = device != "cpu", 0.0, threading.Event()

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        before = self._used()
        thread = threading.Thread(target=self._watch, args=(before,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _watch(self, before: float) -> None:
        while not self._over.wait(0.5):
            self.peak = max(self.peak, self._used() - before)

    def _used(self) -> float:
        if not self._cuda:
            import psutil

            return psutil.virtual_memory().used / 2**30
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return sum(map(float, subprocess.check_output(command, text=True).split())) / 1024


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Read the steps of a run, without the first, which warms up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"][1:]


def steps_of_verl(log: Path) -> list[dict[str, Any]]:
    """Read the steps that verl logged itself, by our names."""
    lines = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    return [{ours: line.get(theirs, 0.0) for ours, theirs in PLAIN.items()} for line in steps][1:]


def mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(step.get(name, 0.0) for step in steps)


def without_sampling(steps: Sequence[dict[str, Any]]) -> float:
    """Seconds of a step that are neither rollouts nor a checkpoint: the median over the steps."""
    return statistics.median(s["seconds"] - s["rollout_seconds"] - s.get("save_seconds", 0.0) for s in steps)


def demo(backend: str, args: argparse.Namespace) -> list[str]:
    """Run the demo on a backend; gives its line of the table."""
    out = args.out / backend
    command = [sys.executable, str(DEMO / "demo.py"), "--backend", backend, "--device", args.device]
    command += ["--steps", str(args.steps), "--model", args.model, "--out", str(out)]
    command += ["--batch-size", "8", "--learning-rate", "4e-5"]
    with Memory(args.device).watched() as memory:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    last = json.loads(done.stdout.splitlines()[-1])
    steps = steps_of(out / "run")
    parts = [f"{mean(steps, name):.2f}" if any(name in step for step in steps) else "" for name in PARTS.values()]
    speed = sum(step["tokens_generated"] for step in steps) / sum(step["rollout_seconds"] for step in steps)
    gap = f"{mean(steps, 'logprob_gap'):.4f}"
    reward = f"{last['reward_before']:.2f} to {last['reward_after']:.2f}"
    return [backend, reward, f"{speed:,.0f}", f"{mean(steps, 'seconds'):.2f}", *parts, gap, f"{memory.peak:.1f}"]


def overhead(args: argparse.Namespace) -> str:
    """Run a program of one call on verl, and its rows again on verl's own trainer."""
    run, log = args.out / "one_call", args.out / "plain.jsonl"
    tasks = args.out / "tasks.jsonl"
    count = 8 * args.steps
    tasks.write_text("".join(json.dumps({"question": f"What is {n} + {n % 7}?"}) + "\n" for n in range(count)))
    command = [sys.executable, "-m", "lightning_trainer.cli", "train", "one_call:run", "--data", str(tasks)]
    command += ["--model", model_folder(args.model), "--backend", "verl", "--device", args.device, "--out", str(run)]
    command += ["--steps", str(args.steps), "--batch-size", "8", "--group-size", "8", "--save-every", str(args.steps)]
    subprocess.run([*command, "--learning-rate", "1e-6", "--max-model-len", "1024"], check=True, cwd=HERE)
    subprocess.run([sys.executable, str(HERE / "replay.py"), str(run), str(log)], check=True)
    ours, plain = without_sampling(steps_of(run)), without_sampling(steps_of_verl(log))
    return (
        f"A step of 64 rows without sampling, median of {args.steps - 1}: {ours:.3f} s with us, {plain:.3f} s with"
        f" verl's own trainer on the same rows: {100 * (ours / plain - 1):+.1f} %."
    )


def model_folder(name: str) -> str:
    from lightning_trainer import models

    return str(models.resolve(name))


def machine(device: str) -> str:
    """Name the device and the versions."""
    name = platform.processor() or platform.machine()
    if device != "cpu":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name = subprocess.check_output(command, text=True).strip()
    return f"{name}; Python {platform.python_version()}; {', '.join(filter(None, map(installed, PACKAGES)))}"


def installed(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def table(lines: Sequence[Sequence[str]]) -> str:
    heads = ["backend", "held-out reward", "tokens/s", "s a step", *PARTS, "gap, nats", "memory, GiB"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda; with cpu it shows that this program works")
    parser.add_argument("--backends", default="torch,verl")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    if args.device != "cpu" and shutil.which("nvidia-smi") is None:
        sys.exit("There is no NVIDIA GPU here (no nvidia-smi). `--device cpu` shows that this program works.")
    if args.steps < 2:
        sys.exit("The first step warms up and is not counted: give at least 2.")
    backends = args.backends.split(",")
    args.out = args.out.absolute()
    if args.out.exists():
        sys.exit(f"{args.out} is there already. Give another --out.")
    args.out.mkdir(parents=True)
    report = [machine(args.device), "", table([demo(backend, args) for backend in backends])]
    if "verl" in backends:
        report += ["", overhead(args)]
    text = "\n".join(report) + "\n"
    (args.out / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
