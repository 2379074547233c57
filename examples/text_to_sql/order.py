"""Writer and rewriter trained on 40 questions in three passes: in shuffled order, and with the curriculum.

`python order.py --results FILE` trains with three seeds each on this machine and counts the groups from which something
was learned; without a file of results of your own it prints the published ones, as `--draw` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import Run, arguments, here, measure, publish, read

HERE = here(__file__)
SETUPS = ("shuffled", "curriculum")
QUESTIONS, BATCH = 40, 8
FIRST_PASS = QUESTIONS // BATCH  # steps, in which both orders are the same


def live(curve: Sequence[float | None]) -> float:
    """Return the share of groups whose rewards differed, from the share of the others, after the first pass."""
    return 1 - fmean(1.0 if share is None else share for share in curve[FIRST_PASS:])


def table(runs: Sequence[Run]) -> str:
    """Return the held-out rewards of each run and its groups with signal."""
    steps = [step for step, _ in runs[0].held_out]
    head = ["order", "seed", *(f"held out after {step} steps" for step in steps), "groups with signal", "entropy"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for run in sorted(runs, key=lambda run: (SETUPS.index(run.setup), run.seed)):
        cells = [run.setup, str(run.seed), *(f"{reward:.2f}" for _, reward in run.held_out)]
        last = [value for value in run.curves["entropy"][-3:] if value is not None]
        cells += [f"{live(run.curves['groups_without_signal']):.0%}", f"{fmean(last):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    from database import write

    args = arguments(dict.fromkeys(SETUPS), HERE / "order.jsonl", steps=15, description=__doc__)

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        val = write(folder / "val.jsonl", seed=12345, count=32)
        return {
            "target": "agent:run",
            "data": write(folder / "train.jsonl", seed=seed + 1, count=QUESTIONS, without=val),
            "val": val,
            "val_every": FIRST_PASS,
            "val_samples": 2,
            "policies": "writer=lora,rewriter=lora,checker=base",
            "model": args.model,
            "learning_rate": args.learning_rate,
            "steps": args.steps,
            "batch_size": BATCH,
            "concurrency": 32,
            "task_order": name,
        }

    if not args.draw:
        measure(args, args.setups.split(","), config)
    publish(args.readme, "order", table(read(args.results)))


if __name__ == "__main__":
    main()
