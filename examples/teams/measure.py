"""Three teams, a shared policy and separate ones, with and without safeguards, and how much of its peak each keeps.

`python measure.py` trains those setups and seeds that measure.jsonl lacks, and `--results FILE` all of them, with three
seeds each; it continues where it stopped. `--quick` takes two steps of each setup with one seed, `--config gpu.toml` is
for a GPU and a larger model, `--draw` only draws.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "text_to_sql"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import Run, arguments, common_options, draw_held_out, here, measure, publish, read

HERE = here(__file__)
TEAMS = {
    "rewriters": ("writer", "checker", "rewriter"),
    "orchestra": ("orchestrator", "counter", "lister"),
    "voters": ("first", "second", "third"),
}
SAFEGUARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "safeguards": {"rollback_on_cliff": True, "agent_weight": "equal"},
}
SETUPS = {
    f"{team}, {policies}, {guards}": (team, policies, guards)
    for team in TEAMS
    for policies in ("shared", "separate")
    for guards in SAFEGUARDS
}
PICTURE = HERE.parent.parent / "docs" / "img" / "teams.png"
STEPS, QUICK_STEPS = 16, 2  # twice those of the example text_to_sql
QUICK = {"steps": QUICK_STEPS, "batch_size": 2, "group_size": 2, "val_every": 1, "val_samples": 1}


def shared_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the command line gives all setups."""
    more = tomllib.loads(args.config.read_text()) if args.config else {}
    return {**common_options(args), **more, **(QUICK if args.quick else {})}


def options_of(setup: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a setup: its team, who shares a policy, and its safeguards."""
    team, policies, guards = SETUPS[setup]
    policy = "lora:team" if policies == "shared" else "lora"
    options: dict[str, Any] = {
        "target": f"teams:{team}",
        "policies": ",".join(f"{agent}={policy}" for agent in TEAMS[team]),
        "val_every": 2,
        "val_samples": 2,
        "concurrency": 32,
        **SAFEGUARDS[guards],
        **args.options,
    }
    return options


def table(runs: Sequence[Run]) -> str:
    """Return the held-out reward of each setup: at its peak and at the end, mean over its seeds."""
    lines = ["| setup | seeds | before | peak | end | end, of the peak | rollbacks |", "|---|---|---|---|---|---|---|"]
    for setup in dict.fromkeys(run.setup for run in runs):
        own = [run for run in runs if run.setup == setup and run.held_out]
        curves = [[reward for _, reward in run.held_out] for run in own]
        if not curves:
            lines.append(f"| {setup} | | nothing to learn | | | | |")
            continue
        first, peak, end = (
            sum(of(curve) for curve in curves) / len(curves) for of in (lambda c: c[0], max, lambda c: c[-1])
        )
        kept = ", ".join(f"{curve[-1] / max(curve):.0%}" if max(curve) > 0 else "no reward" for curve in curves)
        returns = ", ".join(str(sum(name == "rollback" for _, name in run.events)) for run in own)
        lines.append(f"| {setup} | {len(own)} | {first:.2f} | {peak:.2f} | {end:.2f} | {kept} | {returns} |")
    return "\n".join(lines)


def main() -> None:
    from database import write

    args = arguments(
        SETUPS,
        HERE / "measure.jsonl",
        steps=STEPS,
        description=__doc__,
        picture=PICTURE,
        options=shared_options,
        more=lambda parser: (
            parser.add_argument("--quick", action="store_true", help="two steps of each setup, one seed"),
            parser.add_argument("--config", type=Path, help="TOML file with options of train for all setups"),
        ),
    )
    if args.quick:
        args.seeds = "0"

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        options = options_of(name, args)
        tasks, held_out = (4, 2) if args.quick else (options["steps"] * options.get("batch_size", 8), 32)
        val = write(folder / "val.jsonl", seed=12345, count=held_out)
        return options | {"data": write(folder / "train.jsonl", seed=seed + 1, count=tasks, without=val), "val": val}

    if not args.draw:
        measure(args, args.setups.split(";"), config)
    runs = read(args.results)
    if args.quick:
        print(table(runs))
        return
    draw_held_out(runs, list(TEAMS), args.picture)
    publish(args.readme, "measured", table(runs))


if __name__ == "__main__":
    main()
