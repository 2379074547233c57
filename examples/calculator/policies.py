"""The calculator's two agents: each trained alone, both on a policy that they share, and both on policies of their own.

`python policies.py --results FILE` trains every setup with three seeds on this machine; without a file of results of
your own it prints the published ones. `--draw` only draws what was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import arguments, draw, here, measure, publish, read, table

HERE = here(__file__)
PICTURE = HERE.parent.parent / "docs" / "img" / "calculator-policies.png"
SETUPS = {
    "caller alone": "caller=lora,answerer=base",
    "answerer alone": "answerer=lora,caller=base",
    "both on one policy": "caller=lora:both,answerer=lora:both",
    "both on their own": "caller=lora,answerer=lora",
}


def main() -> None:
    from problems import problems, write

    args = arguments(SETUPS, HERE / "policies.jsonl", steps=6, description=__doc__, picture=PICTURE)

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        return {
            "target": "agent:run",
            "data": write(folder / "train.jsonl", problems(seed=seed + 1, count=args.steps * 8)),
            "val": write(folder / "val.jsonl", problems(seed=12345, count=32)),
            "val_samples": 1,
            "policies": SETUPS[name],
            "model": args.model,
            "learning_rate": args.learning_rate,
            "steps": args.steps,
            "concurrency": 32,
        }

    if not args.draw:
        measure(args, args.setups.split(","), config)
    agents = ("caller", "answerer")
    panels = {f"reward/{agent}": agent for agent in agents}
    draw(read(args.results), panels, args.picture)
    publish(args.readme, "policies", table(read(args.results), agents))


if __name__ == "__main__":
    main()
