"""What the measured examples share: train every setup with every seed, keep the curves, draw them, print the table.

Results are lines of JSON, one a run, so that a measurement that was stopped continues where it stopped. All lines of a
file have the same options; the published ones are of the default options.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_spans.errors import NothingToLearnError
from lightning_trainer import TrainConfig, train
from lightning_trainer.report.progress import ProgressDisplay


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        setup: what was compared.
        seed: of the run and its problems.
        curves: by the name of a number, its value in each step.
        before: held-out rewards before training: ``reward``, and by agent.
        after: the same after it.
        seconds: wall time, on a machine that others may have used too.
        cpu_seconds: of all its processes.
        held_out: (steps taken, held-out reward) of each validation.
        events: (steps taken, name) of each alarm, and of each return to earlier weights, which is named ``rollback``.
        options: that all setups have, such as the model. None in lines of earlier versions, which did not record them:
            such lines can be drawn, but nothing is added to them until their options are written into them by hand.
    """

    setup: str
    seed: int
    curves: dict[str, list[float | None]]
    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    cpu_seconds: float = field(default=0.0)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    options: dict[str, Any] | None = field(default=None)


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run that all measured examples have on their command line."""
    return {"model": args.model, "steps": args.steps, "learning_rate": args.learning_rate}


def arguments(
    setups: Mapping[str, Any],
    results: Path,
    *,
    steps: int,
    description: str | None,
    picture: Path | None = None,
    more: Callable[[argparse.ArgumentParser], object] = lambda _parser: None,
    options: Callable[[argparse.Namespace], dict[str, Any]] = common_options,
) -> argparse.Namespace:
    """Read the command line that the measured examples have in common, and what one of them adds.

    Args:
        setups: that are compared.
        results: that are published.
        steps: of a run, by default.
        description: of the example.
        picture: of the published results.
        more: adds options to the command line.
        options: gives those options that decide what a setup comes to, as ``args.options``. Where they are not the
            default ones, or with another file of results, README and picture of the example stay as they are.
    """
    parser = argparse.ArgumentParser(description=description)
    between = ";" if any("," in setup for setup in setups) else ","
    parser.add_argument("--setups", default=between.join(setups), help=f"with {between} between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--model", default="smollm2-135m")
    own = f"{results.stem}-OPTIONS.jsonl in experiments/, for other options than the default ones"
    parser.add_argument("--results", type=Path, help=f"file of JSON lines. Default: {results.name}; {own}")
    parser.add_argument("--readme", type=Path, help="gets the table. Default: the example's, for the published results")
    if picture:
        parser.add_argument("--picture", type=Path, help="of the curves. Default: next to the results")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    more(parser)
    args = parser.parse_args()
    args.options = options(args)
    if args.results is None and args.options != options(parser.parse_args([])):
        args.results = results.parent / "experiments" / f"{results.stem}-{short_hash(args.options)}.jsonl"
    args.results = (args.results or results).resolve()
    published = args.results == results
    if published and not args.readme:
        args.readme = results.with_name("README.md")
    if picture and not args.picture:
        args.picture = picture if published else args.results.with_suffix(".png")
    if args.draw and not args.results.is_file():
        parser.error(f"--draw: {args.results} does not exist.")
    return args


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file of results.

    Raises:
        SystemExit: their options differ.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        _require(path, line.get("options"), lines[0].get("options"))
    return lines


def _require(path: Path, options: dict[str, Any] | None, asked: dict[str, Any] | None) -> None:
    if options != asked:
        has, wants = (json.dumps(each) if each else "options that were not recorded" for each in (options, asked))
        raise SystemExit(f"'{path}' has results of {has}, not of {wants}. Name another file with --results.")


def read(path: Path) -> list[Run]:
    """Read the runs that were measured."""
    return [Run(**line) for line in read_lines(path)]


def missing(args: argparse.Namespace, names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the setups and seeds that the file of results lacks, seed by seed, and print how many it has.

    Raises:
        SystemExit: the file has results of other options.
    """
    lines = read_lines(args.results)
    for line in lines[:1]:
        _require(args.results, line.get("options"), args.options)
    done = {(line["setup"], line["seed"]) for line in lines}
    asked = [(name, int(seed)) for seed in args.seeds.split(",") for name in names]
    lacked = [run for run in asked if run not in done]
    there = f"{len(asked) - len(lacked)} of {len(asked)} runs are in '{args.results}' and are not measured again"
    print(f"{there}: to measure those, too, name another file with --results.", file=sys.stderr)
    return lacked


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def measure(args: argparse.Namespace, names: Sequence[str], config: Callable[[str, int, Path], dict[str, Any]]) -> None:
    """Train what is not measured yet, seed by seed, so that what is there can be compared at any time.

    Args:
        args: the command line, which has the results, their options and the seeds.
        names: of the setups.
        config: gives the options of a run, from its setup, its seed and an empty folder.
    """
    for name, seed in missing(args, names):
        with tempfile.TemporaryDirectory() as folder:
            run = train_once(name, seed, Path(folder), config)
        append(args.results, asdict(replace(run, options=args.options)))


def train_once(name: str, seed: int, folder: Path, config: Callable[[str, int, Path], dict[str, Any]]) -> Run:
    """Train once."""
    before_s, began = cpu_seconds(), time.monotonic()
    chosen = TrainConfig(**{"out": folder / "run", "seed": seed, **config(name, seed, folder)})
    with ProgressDisplay(f"{name}, seed {seed}") as progress:
        try:
            train(chosen, progress)
        except NothingToLearnError as error:  # is a result, too
            print(error, file=sys.stderr)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    kept = sorted({key for line in steps for key in line if key.split("/")[0] in KEPT})
    held_out = [{k: v for k, v in line.items() if k.startswith("reward")} for line in lines if line["kind"] == "val"]
    return Run(
        setup=name,
        seed=seed,
        curves={key: [_short(line.get(key)) for line in steps] for key in kept},
        before=held_out[0],
        after=held_out[-1],
        seconds=round(time.monotonic() - began, 1),
        cpu_seconds=round(cpu_seconds() - before_s, 1),
        held_out=[(line["step"], round(line["reward"], 4)) for line in lines if line["kind"] == "val"],
        events=[(line["step"], line.get("name", line["kind"])) for line in lines if line["kind"] in EVENTS],
    )


EVENTS = {"alarm", "rollback"}
KEPT = {
    *("reward", "reward_source", "tool_error_rate", "entropy", "calls_taught", "teacher_kl", "gradient_share"),
    "groups_without_signal",
    *("seconds", "rollout_seconds", "update_seconds"),
}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def here(file: str) -> Path:
    """Work in the example's folder, where its agent is."""
    folder = Path(file).resolve().parent
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    return folder


def draw(runs: Sequence[Run], panels: Mapping[str, str], path: Path, *, label: str = "step") -> None:
    """Draw a panel for each number: a thin line for each run, a thick one for the mean of each setup.

    Args:
        runs: that were measured.
        panels: title of each panel, by the name of the number that it shows.
        path: of the picture.
        label: of the x axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.9), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (number, title) in zip(all_axes, panels.items(), strict=True):
        for place, setup in enumerate(dict.fromkeys(run.setup for run in runs)):
            own = [run.curves[number] for run in runs if run.setup == setup and number in run.curves]
            for curve in own:
                axes.plot(curve, color=f"C{place}", linewidth=0.7, alpha=0.45)
            if own:
                mean = [statistics.fmean(v or 0.0 for v in values) for values in zip(*own, strict=False)]
                axes.plot(mean, color=f"C{place}", linewidth=2.2, label=f"{setup} ({len(own)})")
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
        axes.set_ylim(-0.02, 1.02)
    all_axes[0].set_ylabel("mean training reward")
    all_axes[-1].legend(title="setup (seeds)", fontsize="small")
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def draw_held_out(runs: Sequence[Run], teams: Sequence[str], path: Path) -> None:
    """Draw a panel for each team: the held-out reward of each run, and as a thick line the mean of each setup."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(teams), 3.9), layout="constrained")
    for axes, team in zip(figure.subplots(1, len(teams), sharey=True, squeeze=False)[0], teams, strict=True):
        own = [run for run in runs if run.setup.startswith(f"{team},") and run.held_out]
        for place, setup in enumerate(dict.fromkeys(run.setup for run in own)):
            curves = [run.held_out for run in own if run.setup == setup]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=f"C{place}", linewidth=0.7, alpha=0.45)
            means = [(points[0][0], statistics.fmean(r for _, r in points)) for points in zip(*curves, strict=False)]
            label = f"{setup.partition(', ')[2]} ({len(curves)})"
            axes.plot(*zip(*means, strict=True), color=f"C{place}", linewidth=2.2, label=label)
        axes.set_title(team)
        axes.set_xlabel("steps taken")
        axes.grid(visible=True, alpha=0.3)
        axes.set_ylim(-0.02, 1.02)
        if own:
            axes.legend(title="setup (seeds)", fontsize="x-small")
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def table(runs: Sequence[Run], agents: Sequence[str]) -> str:
    """Return the held-out rewards of each run as a table of Markdown."""
    head = ["setup", "seed", *(f"{name}, before and after" for name in ("reward", *agents)), "CPU s", "wall s"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for run in sorted(runs, key=lambda run: (run.setup, run.seed)):
        cells = [run.setup, str(run.seed)]
        keys = ("reward", *(f"reward/{agent}" for agent in agents))
        cells += [f"{run.before.get(key, 0.0):.2f} to {run.after.get(key, 0.0):.2f}" for key in keys]
        lines.append(f"| {' | '.join([*cells, f'{run.cpu_seconds:.0f}', f'{run.seconds:.0f}'])} |")
    return "\n".join(lines)


def short_hash(options: Mapping[str, Any]) -> str:
    """Return a short hash of options."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def hash_options(path: Path) -> str:
    """Return a short hash of the options in a TOML file, without those of the quick form."""
    return short_hash({name: value for name, value in tomllib.loads(path.read_text()).items() if name != "quick"})


def merge(path: Path, rows: Sequence[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    """Write rows to a file of JSON lines, in place of those with the same fields, and return all by their seeds."""

    def key(row: dict[str, Any]) -> list[Any]:
        return [row.get(field) for field in fields]

    replaced = [key(row) for row in rows]
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged = [*rows, *(row for row in before if key(row) not in replaced)]
    merged.sort(key=lambda row: int(row["seed"]))  # stable: the rows of a seed keep their order
    path.write_text("".join(f"{json.dumps(row)}\n" for row in merged))
    return merged


def tables(rows: Sequence[dict[str, Any]], toml: Path, table: Callable[[list[dict[str, Any]]], str]) -> str:
    """Return a table of the rows with the current options of a TOML file, and one for each of other options."""
    current = hash_options(toml)
    parts = []
    for options in sorted({str(row.get("options")) for row in rows}, key=lambda options: (options != current, options)):
        if options != current:
            parts.append(f"Measured with other options than the current ones of `{toml.name}` (`{options}`):")
        parts.append(table([row for row in rows if str(row.get("options")) == options]))
    return "\n\n".join(parts)


def publish(readme: Path | None, name: str, text: str) -> None:
    """Print a text, and put it into a README, where there is one, between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    print(text)
    if readme is None:
        return
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = readme.read_text().partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{readme} has no {begin.strip()}"
    readme.write_text(f"{before}{begin}{text}\n{end}{after}")
