"""The writer alone improved by `improve`, and by each of its methods alone, with the same number of tokens.

`python methods.py --results FILE` searches with three seeds on this machine, and measures what is kept on questions
that no search has seen; without a file of results of your own it prints the published ones, as `--draw` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import append, arguments, here, missing, publish, read_lines

HERE = here(__file__)
SETUPS = {"improve": ("sft", "rl"), "sft": ("sft",), "rl": ("rl",)}
AGENT = "writer"
TOKENS = 120_000
LEARNED, HELD_OUT, TESTED = 160, 40, 40  # questions


def search(setup: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Search once, and compare what is kept with the unchanged model on other questions."""
    from database import write

    from lightning_trainer import TrainConfig
    from lightning_trainer.kits.evaluation.config import EvalConfig
    from lightning_trainer.kits.evaluation.evaluate import evaluate
    from lightning_trainer.kits.improve.config import ImproveConfig
    from lightning_trainer.kits.improve.improve import improve
    from lightning_trainer.report.progress import ProgressDisplay

    test = write(folder / "test.jsonl", seed=54321, count=TESTED)
    val = write(folder / "val.jsonl", seed=12345, count=HELD_OUT, without=test)
    learned = write(folder / "train.jsonl", seed=seed + 1, count=LEARNED, without=test)
    program: dict[str, Any] = {"target": "agent:run_writer", "seed": seed, "concurrency": 32}
    train = TrainConfig(
        data=learned,
        val=val,
        model=args.model,
        agents=(AGENT,),
        lora_rank=16,
        learning_rate=args.learning_rate,
        **program,
    )
    config = ImproveConfig(train=train, methods=SETUPS[setup], budget=args.tokens, samples=2)
    with ProgressDisplay(f"{setup}, seed {seed}") as progress:
        found = improve(config, progress, out=folder / "search")
        options = EvalConfig(
            data=test, model=str(folder / "search"), against=args.model, samples=2, out=folder / "test", **program
        )
        tested = evaluate(options, progress).to_json()
    its = {name: value for name, value in found.to_json().items() if name not in {"folder", "checkpoint", "prompts"}}
    base, rise = tested["against"]["by_agent"][AGENT], tested["by_agent"][AGENT]
    return {
        "setup": setup, "seed": seed, "search": its, "before": base["mean"], "after": rise["mean"],
        "difference": [rise[name] for name in ("difference", "low", "high")],
    }  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return what each search kept and bought."""
    head = ["search", "seed", "kept", "tokens", "to measure", "before", "after", "difference, 95 %"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for run in sorted(runs, key=lambda run: (run["seed"], list(SETUPS).index(run["setup"]))):
        found = run["search"]
        mean, low, high = run["difference"]
        cells = [run["setup"], str(run["seed"]), found["agents"][AGENT]["method"]]
        cells += [f"{found['tokens']:,}", f"{found['measured_tokens']:,}"]
        cells += [f"{run['before']:.2f}", f"{run['after']:.2f}", f"{mean:.2f} ({low:.2f} to {high:.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    args = arguments(
        SETUPS,
        HERE / "methods.jsonl",
        steps=0,
        description=__doc__,
        more=lambda parser: parser.add_argument("--tokens", type=int, default=TOKENS, help="budget of each search"),
        options=lambda args: {"model": args.model, "learning_rate": args.learning_rate, "tokens": args.tokens},
    )
    if not args.draw:
        for setup, seed in missing(args, args.setups.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found = search(setup, seed, Path(folder), args)
            append(args.results, {**found, "options": args.options})
    publish(args.readme, "methods", table(read_lines(args.results)))


if __name__ == "__main__":
    main()
