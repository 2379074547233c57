"""The calculator's agents with and without automatic rewards for tools that work.

All that the program says is whether the final answer was right. `python tool_rewards.py --results FILE` trains with
three seeds each on this machine and counts the rollouts until 0.8 of the answers were right; without a file of results
of your own it prints the published ones. `--draw` only draws what was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import Run, arguments, draw, here, measure, publish, read, table

HERE = here(__file__)
PICTURE = HERE.parent.parent / "docs" / "img" / "tool-rewards.png"
SETUPS: dict[str, dict[str, float]] = {
    "answer only": {},
    "answer and tool status": {"tool_status": 0.5},
}
GOAL, BATCH = 0.8, 64


def rollouts_to_goal(run: Run) -> str:
    """How many rollouts were made until a step's answers reached the goal, that step's own not counted."""
    steps = (step for step, reward in enumerate(run.curves["reward"]) if (reward or 0.0) >= GOAL)
    reached = next(steps, None)
    return f"more than {len(run.curves['reward']) * BATCH}" if reached is None else str(reached * BATCH)


def main() -> None:
    from problems import problems, write

    args = arguments(SETUPS, HERE / "tool_rewards.jsonl", steps=8, description=__doc__, picture=PICTURE)

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        return {
            "target": "agent:outcome",
            "agents": "caller,answerer",
            "data": write(folder / "train.jsonl", problems(seed=seed + 1, count=args.steps * 8)),
            "val": write(folder / "val.jsonl", problems(seed=12345, count=32)),
            "rewards": SETUPS[name],
            "lora_rank": 16,
            "model": args.model,
            "learning_rate": args.learning_rate,
            "steps": args.steps,
            "until": GOAL,
            "concurrency": 32,
        }

    if not args.draw:
        measure(args, args.setups.split(","), config)
    runs = read(args.results)
    draw(runs, {"reward": "right answers"}, args.picture)
    ordered = sorted(runs, key=lambda run: (run.setup, run.seed))
    needed = [f"| {run.setup} | {run.seed} | {rollouts_to_goal(run)} |" for run in ordered]
    head = [f"| rewards | seed | rollouts to {GOAL} |", "|---|---|---|"]
    publish(args.readme, "tool rewards", "\n".join([*head, *needed, "", table(runs, ())]))


if __name__ == "__main__":
    main()
