"""Writer and rewriter trained with and without what SQLite said of a refused query as the teacher (SDPO).

`python teacher.py --results FILE` trains with three seeds each on this machine and counts the steps until half of the
writer's queries were right; `--draw` only draws what was measured. The published results are of earlier questions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import Run, arguments, draw, here, measure, publish, read, table

HERE = here(__file__)
PICTURE = HERE.parent.parent / "docs" / "img" / "text-to-sql-teacher.png"
SETUPS: dict[str, dict[str, Any]] = {
    "rewards alone": {},
    "rewards and errors": {"teacher": "self", "teacher_options": {"weight": 0.1}},
}
GOAL = 0.5


def steps_to_goal(run: Run) -> str:
    """In which step the writer's queries, each step on new questions, reached the goal."""
    curve = run.curves["reward/writer"]
    reached = next((step for step, reward in enumerate(curve, 1) if (reward or 0.0) >= GOAL), None)
    return f"more than {len(curve)}" if reached is None else str(reached)


def summarise_teaching(run: Run) -> str:
    """How many calls were taught in all, and the mean divergence from the teacher in the first and the last step."""
    calls = sum(count or 0.0 for count in run.curves.get("calls_taught", []))
    apart = [value for value in run.curves.get("teacher_kl", []) if value is not None]
    return f"{calls:.0f} | {apart[0]:.2f} to {apart[-1]:.2f}" if apart else " | "


def main() -> None:
    from database import write

    args = arguments(SETUPS, HERE / "teacher.jsonl", steps=8, description=__doc__, picture=PICTURE)

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        val = write(folder / "val.jsonl", seed=12345, count=32)
        return {
            "target": "agent:run",
            "data": write(folder / "train.jsonl", seed=seed + 1, count=args.steps * 8, without=val),
            "val": val,
            "val_samples": 4,
            "policies": "writer=lora,rewriter=lora,checker=base",
            "model": args.model,
            "learning_rate": args.learning_rate,
            "steps": args.steps,
            "concurrency": 32,
            **SETUPS[name],
        }

    if not args.draw:
        measure(args, args.setups.split(","), config)
    runs = read(args.results)
    draw(runs, {"reward/writer": "writer"}, args.picture)
    ordered = sorted(runs, key=lambda run: (run.setup, run.seed))
    needed = [f"| {run.setup} | {run.seed} | {steps_to_goal(run)} | {summarise_teaching(run)} |" for run in ordered]
    goal = f"step in which the writer reached {GOAL}"
    head = [f"| setup | seed | {goal} | calls taught | divergence |", "|---|---|---|---|---|"]
    publish(args.readme, "teacher", "\n".join([*head, *needed, "", table(runs, ("writer", "rewriter"))]))


if __name__ == "__main__":
    main()
