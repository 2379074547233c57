"""Train the calculator's agents on one accelerator with each backend, and say where the time goes.

    python tests/gpu/measure.py [--device cuda] [--backends torch,verl] [--steps 14] [--model smollm2-135m] [--out DIR]

`nox -s gpu` runs it; `nox -s gpu -- --backends torch` needs, and installs, neither verl nor vLLM. On torch, the
forecast of a dry run is compared with what the run then takes. With verl among the backends, a run of a program with
one call is then given to verl's own trainer again, row by row (`replay.py`): the difference of what both need for a
step, without sampling, is what we add.

DIR/report.md names machine and versions. It is written again after each part, so it has whatever was measured if a
later part fails or the time is over: with `--seconds`, each part gets an equal share of the time that is left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "examples" / "calculator"
PACKAGES = ("torch", "transformers", "verl", "vllm", "ray", "flash-attn")
TARGET = 0.2  # within which a forecast should be
SHORTEST_S = 5.0  # a part that has less time is not started
# What a step consists of, by the names of metrics.jsonl.
PARTS = {
    "rollouts": "rollout_seconds",
    "log-probabilities": "logprob_seconds",
    "update": "update_seconds",
    "weight sync": "weights_seconds",
}
PLAIN = {"seconds": "timing_s/step", "rollout_seconds": "timing_s/gen", "save_seconds": "timing_s/save_checkpoint"}
HEADS = ("backend", "held-out reward", "steps", "tokens/s", "s a step", *PARTS, "gap, nats", "memory, GiB")


class OutOfTimeError(Exception):
    """A part took longer than its share, or the whole was stopped."""


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


class Budget:
    """Seconds that are left, and the parts that share them."""

    def __init__(self, seconds: float | None, parts: int) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._parts = parts

    def share(self) -> float | None:
        """Return the seconds of the next part; None: no limit."""
        share = None if self._end is None else (self._end - time.monotonic()) / max(1, self._parts)
        self._parts -= 1
        return share

    def stop(self, *_: int | FrameType | None) -> None:
        """Leave no time for what has not ended; a handler of signals."""
        self._end = 0.0
        raise OutOfTimeError("stopped")


def call(command: Sequence[str], log: Path, limit_s: float | None, **how: Any) -> str:
    """Run a program with all that it starts, and return its output.

    Raises:
        OutOfTimeError: it took too long, or this process was stopped. The program is asked to save first.
        CalledProcessError: it failed.
    """
    if limit_s is not None and limit_s < SHORTEST_S:
        raise OutOfTimeError("not started: no time was left")
    out = log.with_suffix(".out")
    with log.open("w") as errors, out.open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=errors, start_new_session=True, **how)
        try:
            status = process.wait(limit_s)
        except (subprocess.TimeoutExpired, OutOfTimeError) as error:
            end(process)
            told = f"cut off after {limit_s:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
            raise OutOfTimeError(told) from None
    if status:
        raise subprocess.CalledProcessError(status, command, stderr=log.read_text()[-1500:])
    return out.read_text()


def end(process: subprocess.Popen[Any], patience_s: float = 15.0) -> None:
    """End a program and what it started: first politely, so that it saves."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Read the metrics of a run, which may have been cut off."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] == kind]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Read the steps of a run, without the first, which warms up."""
    return lines_of(run, "train")[1:]


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


def demo_of(backend: str, args: argparse.Namespace, *more: str) -> list[str]:
    """Return the command of the demo on a backend."""
    command = [sys.executable, str(DEMO / "demo.py"), "--backend", backend, "--device", args.device]
    command += ["--steps", str(args.steps), "--model", args.model, "--batch-size", "8", "--learning-rate", "4e-5"]
    return [*command, *more]


def forecast(args: argparse.Namespace, limit_s: float | None) -> None:
    """Forecast the demo's run on torch."""
    out = args.out / "forecast"
    printed = call(demo_of("torch", args, "--dry-run", "--out", str(out)), args.out / "forecast.log", limit_s)
    (args.out / "forecast.json").write_text(printed.splitlines()[-1])


def demo(backend: str, args: argparse.Namespace, limit_s: float | None) -> None:
    """Run the demo on a backend, and note its memory."""
    out = args.out / backend
    with Memory(args.device).watched() as memory:
        try:
            call(demo_of(backend, args, "--out", str(out)), args.out / f"{backend}.log", limit_s)
        finally:
            (args.out / f"{backend}.memory").write_text(f"{memory.peak}")


def overhead(args: argparse.Namespace, limit_s: float | None) -> None:
    """Run a program of one call on verl, and its rows again on verl's own trainer."""
    run, log = args.out / "one_call", args.out / "plain.jsonl"
    tasks, began = args.out / "tasks.jsonl", time.monotonic()
    count = 8 * args.steps
    tasks.write_text("".join(json.dumps({"question": f"What is {n} + {n % 7}?"}) + "\n" for n in range(count)))
    command = [sys.executable, "-m", "lightning_trainer.cli", "train", "one_call:run", "--data", str(tasks)]
    command += ["--model", model_folder(args.model), "--backend", "verl", "--device", args.device, "--out", str(run)]
    command += ["--steps", str(args.steps), "--batch-size", "8", "--group-size", "8", "--save-every", str(args.steps)]
    command += ["--learning-rate", "1e-6", "--max-model-len", "1024"]
    call(command, args.out / "one_call.log", limit_s, cwd=HERE)
    left = None if limit_s is None else limit_s - (time.monotonic() - began)
    call([sys.executable, str(HERE / "replay.py"), str(run), str(log)], args.out / "plain.log", left)


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


def line_of(backend: str, out: Path) -> list[str] | None:
    """Return a backend's line of the table, from as many steps as its run took; None if it took less than two."""
    run = out / backend / "run"
    steps, held = steps_of(run), [line["reward"] for line in lines_of(run, "val")]
    if not steps:
        return None
    parts = [f"{mean(steps, name):.2f}" if any(name in step for step in steps) else "" for name in PARTS.values()]
    speed = sum(step["tokens_generated"] for step in steps) / sum(step["rollout_seconds"] for step in steps)
    reward = " to ".join(f"{each:.2f}" for each in (held[:1] + held[1:][-1:]))
    memory = float((out / f"{backend}.memory").read_text())
    numbers = [f"{speed:,.0f}", f"{mean(steps, 'seconds'):.2f}", *parts, f"{mean(steps, 'logprob_gap'):.4f}"]
    return [backend, reward, str(len(steps) + 1), *numbers, f"{memory:.1f}"]


def compared(out: Path) -> list[list[str]]:
    """Return the forecast of the run on torch next to what it took: quantity, forecast, measured, difference."""
    path, steps = out / "forecast.json", steps_of(out / "torch" / "run")
    if not path.exists() or not steps:
        return []
    facts = json.loads(path.read_text())
    found = [
        ("s a step", facts["seconds_step"], mean(steps, "seconds")),
        ("s of rollouts", facts["seconds_rollouts"], mean(steps, "rollout_seconds")),
        ("s of the update", facts["seconds_update"], mean(steps, "update_seconds")),
    ]
    taught, known = 1 - mean(steps, "groups_without_signal"), facts["signal"]
    if known < 1:  # the share of groups with a signal is a guess; with the run's own, only the cost is compared
        now, whole = facts["seconds_update_now"], facts["seconds_update_all"]
        told = now + (whole - now) * (taught - known) / (1 - known)
        found.append((f"the same, {taught:.0%} of groups with a signal", told, mean(steps, "update_seconds")))
    used = max(step.get("gpu_memory_bytes", 0.0) for step in steps) / 2**30
    planned = re.search(r"learner: ([\d.]+) GiB", "\n".join(facts["engine"]))
    if used:
        found.append(("GiB of the learner, tried", facts["gpu_memory_bytes"] / 2**30, used))
        found += [("GiB of the learner, computed", float(planned[1]), used)] if planned else []
    return [[name, f"{told:.2f}", f"{took:.2f}", verdict(told, took)] for name, told, took in found]


def verdict(told: float, took: float) -> str:
    """Return the difference, and whether it is within the target."""
    if not took:
        return "nothing was measured"
    apart = told / took - 1
    return f"{apart:+.0%}" if abs(apart) <= TARGET else f"**{apart:+.0%}, more than {TARGET:.0%}**"


def added(args: argparse.Namespace) -> list[str]:
    """Return what we add to a step of verl's, as a sentence."""
    log = args.out / "plain.jsonl"
    steps, plain = steps_of(args.out / "one_call"), steps_of_verl(log) if log.exists() else []
    if not steps or not plain:
        return []
    ours, theirs = without_sampling(steps), without_sampling(plain)
    return [
        (
            f"A step of 64 rows without sampling, median of {len(steps)}: {ours:.3f} s with us, {theirs:.3f} s with"
            f" verl's own trainer on the same rows: {100 * (ours / theirs - 1):+.1f} %."
        )
    ]


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def report(args: argparse.Namespace, ends: Sequence[str]) -> str:
    """Return the report on all that was measured so far, and how each part ended."""
    lines = [line for backend in args.backends.split(",") if (line := line_of(backend, args.out))]
    sections = [machine(args.device)]
    sections += [table(HEADS, lines)] if lines else []
    if forecasts := compared(args.out):
        sections.append(table(("quantity", "forecast", "measured", f"difference (target {TARGET:.0%})"), forecasts))
    return "\n\n".join([*sections, *added(args), "\n".join(ends)]) + "\n"


def measure(args: argparse.Namespace) -> bool:
    """Run all parts; return whether each succeeded."""
    parts: dict[str, Callable[[float | None], None]] = {}
    for backend in args.backends.split(","):
        if backend == "torch":
            parts["forecast"] = lambda limit_s: forecast(args, limit_s)
        parts[backend] = lambda limit_s, backend=backend: demo(backend, args, limit_s)
        if backend == "verl":
            parts["overhead"] = lambda limit_s: overhead(args, limit_s)
    budget, ends = Budget(args.seconds, len(parts)), list[str]()
    signal.signal(signal.SIGTERM, budget.stop)
    for name, part in parts.items():
        began, how = time.monotonic(), "done"
        try:
            part(budget.share())
        except OutOfTimeError as error:
            how = f"NOT finished: {error}"
        except subprocess.CalledProcessError as error:
            how = f"FAILED with status {error.returncode}: {' '.join(str(error.stderr).strip().splitlines()[-2:])}"
        except Exception as error:  # whatever it is, the other parts are measured
            how = f"FAILED: {type(error).__name__}: {error}"
        ends.append(f"- {name}: {how}, {time.monotonic() - began:.0f} s")
        (args.out / "report.md").write_text(report(args, ends))
    return all(": done, " in line for line in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda; with cpu it shows that this program works")
    parser.add_argument("--backends", default="torch,verl")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, help="end after so many, with what was measured by then")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    if args.device != "cpu" and shutil.which("nvidia-smi") is None:
        sys.exit("There is no NVIDIA GPU here (no nvidia-smi). `--device cpu` shows that this program works.")
    if args.steps < 2:
        sys.exit("The first step warms up and is not counted: give at least 2.")
    args.out = args.out.absolute()
    if args.out.exists():
        sys.exit(f"{args.out} is there already. Give another --out.")
    args.out.mkdir(parents=True)
    whole = measure(args)
    print((args.out / "report.md").read_text())
    sys.exit(0 if whole else f"not everything was measured. Logs are in {args.out}")


if __name__ == "__main__":
    main()
