"""GRPO and counterfactual credit on one of the examples, with one reward for the team, at equal tokens.

`python examples/credit.py NAME [--seeds 0,1,2] [--quick] [--out FOLDER]`; NAME is a folder beside this file that has a
`credit.toml`: the tokens that each run may read and draw, options that all of them have, those of each setup, and
`[quick]` ones. Each run is trained by `lightning-rl train` until it has spent its tokens, and validated on the way; the
commands are printed. One that was stopped goes on from its newest checkpoint. The table goes between marks in the
folder's README, the curve beside it, the figures into `credit.jsonl`, with what was measured before; what was measured
with other options has a table of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES))

from curves import hash_options, merge, publish, tables  # noqa: E402

NOTHING_TO_LEARN = 4  # exit status of `lightning-rl train`
# Of a step: what rollouts that begin anew read and drew, and what forks did. What a record gave is not among it.
SPENT = ("tokens_prompt", "tokens_generated", "fork_tokens_prompt", "fork_tokens_generated")
PARTS = (0.25, 0.5, 1.0)  # of the tokens, at which setups are compared


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        setup: what is compared.
        seed: of the run.
        steps: that were taken.
        curve: tokens that were spent, and the held-out reward then.
        options: hash of those of `credit.toml`.
    """

    setup: str
    seed: int
    steps: int
    curve: list[tuple[int, float]]
    options: str = ""

    def at(self, tokens: float) -> float | None:
        """Return the held-out reward after so many tokens, on the line between validations; None where it ended."""
        if self.curve and self.curve[0][0] == tokens:
            return self.curve[0][1]
        for (before, low), (after, high) in zip(self.curve, self.curve[1:], strict=False):
            if before <= tokens <= after:
                return low + (high - low) * (tokens - before) / max(1, after - before)
        return None


def read(folder: Path, setup: str, seed: int) -> Run:
    """Read a run from its folder."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cost = {line["step"]: sum(line.get(name, 0) for name in SPENT) for line in lines if line["kind"] == "train"}
    rewards = {line["step"]: line["reward"] for line in lines if line["kind"] == "val" and "reward" in line}
    spent = {step: round(sum(its for at, its in cost.items() if at < step)) for step in rewards}
    return Run(
        setup=setup, seed=seed, steps=len(cost), curve=[(spent[step], rewards[step]) for step in sorted(rewards)]
    )


class Comparison:
    """The runs of one example.

    Args:
        name: of the example's folder.
        out: folder for data and runs.
        quick: a small piece, to see that it works.
    """

    def __init__(self, name: str, out: Path, *, quick: bool) -> None:
        self.here, self.out = EXAMPLES / name, out
        told = tomllib.loads((self.here / "credit.toml").read_text())
        quickly = told.pop("quick", {}) if quick else {}
        self.tokens: int = quickly.get("tokens", told["tokens"])
        self.setups: dict[str, dict[str, Any]] = told["setups"]
        self._make: str = told["make"]
        self._held_out: int | None = quickly.get("held-out")
        self._options: dict[str, Any] = {**told["train"], **quickly.get("train", {})}

    def run(self, seeds: Sequence[int]) -> list[Run]:
        """Train what has tokens left, seed by seed."""
        if not (self.out / "data").exists():
            making = self.out / "data.part"
            making.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, str(self.here / self._make)], cwd=making, check=True)
            val = making / "val.jsonl"
            val.write_text("".join(val.read_text().splitlines(keepends=True)[: self._held_out]))
            making.rename(self.out / "data")
        return [self._trained(setup, seed) for seed in seeds for setup in self.setups]

    def options(self, setup: str) -> dict[str, Any]:
        """Return the options of a setup."""
        return {**self._options, **self.setups[setup]}

    def _trained(self, setup: str, seed: int) -> Run:
        folder = self.out / f"{setup}-{seed}"
        while True:
            run = read(folder, setup, seed)
            spent = run.curve[-1][0] if run.curve else 0
            if spent >= self.tokens or (folder / "nothing").exists():
                return run
            steps = math.ceil(run.steps * self.tokens / spent) if spent else self.options(setup)["val-every"]
            command = self._command(setup, seed, folder, max(steps, run.steps + 1))
            print("$", " ".join(command), flush=True)
            status = subprocess.run(command, cwd=self.here, stdout=subprocess.DEVNULL, check=False).returncode
            if status == NOTHING_TO_LEARN:
                (folder / "nothing").touch()
            elif status:
                raise SystemExit(f"lightning-rl train ended with {status}: see above.")

    def _command(self, setup: str, seed: int, folder: Path, steps: int) -> list[str]:
        if (folder / "checkpoint").exists():
            return ["lightning-rl", "train", "--resume", str(folder), "--steps", str(steps)]
        shutil.rmtree(folder, ignore_errors=True)
        options = self.options(setup)
        target = options.pop("target")
        data, val = (str(self.out / "data" / f"{part}.jsonl") for part in ("train", "val"))
        where = {"data": data, "val": val, "steps": steps, "seed": seed, "out": folder}
        flags = [word for name, value in {**options, **where}.items() for word in (f"--{name}", str(value))]
        return ["lightning-rl", "train", target, *flags]


def table(runs: Sequence[Run], tokens: int) -> str:
    """Return what setups came to after equal tokens: the mean over seeds, with the least and the most."""
    head = ["setup", "seeds", "steps", "untrained", *(f"after {round(tokens * part):,} tokens" for part in PARTS)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for setup in dict.fromkeys(run.setup for run in runs):
        own = [run for run in runs if run.setup == setup]
        rewards = [[run.at(tokens * part) for run in own] for part in (0.0, *PARTS)]
        steps = [run.steps for run in own]
        counted = f"{min(steps)} to {max(steps)}" if len({*steps}) > 1 else str(steps[0])
        lines.append(f"| {' | '.join([setup, str(len(own)), counted, *map(_spread, rewards)])} |")
    return "\n".join(lines)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(values) == 1:
        return f"{known[0]:.3f}"
    ended = "" if len(known) == len(values) else f", {len(values) - len(known)} ended before"
    return f"{statistics.fmean(known):.3f} ({min(known):.3f} to {max(known):.3f}{ended})"


def keep(folder: Path, measured: Sequence[Run]) -> list[dict[str, Any]]:
    """Write runs to credit.jsonl, in place of the same setups and seeds with the same options; return all rows."""
    options = hash_options(folder / "credit.toml")
    rows = [asdict(replace(run, options=options)) for run in measured]
    return merge(folder / "credit.jsonl", rows, "setup", "seed", "options")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw held-out rewards over tokens, a line for each run and a colour for each setup."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, setup in enumerate(dict.fromkeys(run.setup for run in runs)):
        for number, run in enumerate(run for run in runs if run.setup == setup):
            tokens, rewards = zip(*run.curve, strict=True) if run.curve else ((), ())
            axes.plot(tokens, rewards, color=f"C{place}", alpha=0.8, label=setup if number == 0 else None)
    axes.set_xlabel("tokens read and drawn")
    axes.set_ylabel("held-out reward of the team")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def main() -> None:
    """Measure what is asked for, and publish the table, unless it was only a quick look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.parent.name for path in EXAMPLES.glob("*/credit.toml")))
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--quick", action="store_true", help="a small piece of each run, for a look that it works")
    parser.add_argument("--out", type=Path, default=Path("experiments"))
    given = parser.parse_args()
    out = (given.out / f"{given.name}-credit{'-quick' if given.quick else ''}").resolve()
    comparison = Comparison(given.name, out, quick=given.quick)
    runs = comparison.run([0] if given.quick else [int(seed) for seed in given.seeds.split(",")])
    if given.quick:
        print(table(runs, comparison.tokens))
        return
    rows, toml = keep(comparison.here, runs), comparison.here / "credit.toml"
    everything, current = [Run(**row) for row in rows], hash_options(toml)
    lines = [run if run.options == current else replace(run, setup=f"{run.setup}, other options") for run in everything]
    draw(lines, EXAMPLES.parent / "docs" / "img" / f"{given.name.replace('_', '-')}-credit.png")
    told = tables(rows, toml, lambda own: table([Run(**row) for row in own], comparison.tokens))
    publish(comparison.here / "README.md", "credit", told)


if __name__ == "__main__":
    main()
