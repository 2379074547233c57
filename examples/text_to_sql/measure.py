"""Writer and rewriter trained, each on a policy of its own; the checker answers with the frozen model.

`python measure.py --results FILE` trains with three seeds on this machine; without a file of results of your own it
prints the published ones. `--draw` only draws what was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from curves import arguments, draw, here, measure, publish, read, table

HERE = here(__file__)
PICTURE = HERE.parent.parent / "docs" / "img" / "text-to-sql.png"
SETUPS = {"writer and rewriter": "writer=lora,rewriter=lora,checker=base"}


def main() -> None:
    from database import write

    args = arguments(SETUPS, HERE / "measure.jsonl", steps=8, description=__doc__, picture=PICTURE)

    def config(name: str, seed: int, folder: Path) -> dict[str, Any]:
        val = write(folder / "val.jsonl", seed=12345, count=32)
        return {
            "target": "agent:run",
            "data": write(folder / "train.jsonl", seed=seed + 1, count=args.steps * 8, without=val),
            "val": val,
            "val_samples": 2,
            "policies": SETUPS[name],
            "model": args.model,
            "learning_rate": args.learning_rate,
            "steps": args.steps,
            "concurrency": 32,
        }

    if not args.draw:
        measure(args, args.setups.split(","), config)
    runs = read(args.results)
    panels = {"reward/writer": "writer", "reward/rewriter": "rewriter, where it is asked"}
    draw(runs, panels, args.picture)
    publish(args.readme, "measured", table(runs, ("writer", "rewriter")))


if __name__ == "__main__":
    main()
