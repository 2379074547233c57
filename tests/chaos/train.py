"""The trainer that chaos kills: the real loop, with a learner that writes down a hash of each batch it is given."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_spans.store.http import HttpStore
from lightning_trainer.backend_protocol import OpenRun
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report.progress import Silent
from lightning_trainer.run.loop import Loop
from lightning_trainer.run.state import State, find, read_state
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.session import Session

TASKS = [{"question": f"question {n}"} for n in range(12)]


class Log:
    """Metrics are not what is tested here."""

    alarms: tuple[Any, ...] = ()

    def add(self, *_: Any) -> None: ...

    def draw(self) -> None: ...

    def series(self, *_: Any) -> list[Any]:
        return []

    def lines(self, *_: Any) -> list[Any]:
        return []

    def validations(self) -> list[Any]:
        return []


class Learner:
    """Writes a line for each update: the step, a hash of all that a model would learn from, and the rollouts in it."""

    engine = SimpleNamespace(model="policy", version=0)
    engines = (engine,)
    penalties = None

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.loop: Loop | None = None
        self.seen: dict[Any, Any] = {}

    def update(self, rows: Any) -> dict[str, float]:
        assert self.loop is not None
        digest = hashlib.sha256()
        for row in rows:
            for array in (row.tokens, row.mask, row.logprobs, row.advantages):
                digest.update(array.tobytes())
            digest.update(f"{row.agent} {row.rollout_id.partition(':')[2]} {row.lengths}".encode())
        attempts = sorted({row.attempt_id for row in rows})
        line = {"step": self.loop.state.step, "hash": digest.hexdigest(), "rows": len(rows), "attempts": attempts}
        os.write(self._file, (json.dumps(line) + "\n").encode())
        return {}

    def save(self, folder: Path, *, resumable: bool = True) -> None:
        (folder / "weights").write_text("none")

    def strip(self, folder: Path) -> None:
        pass


def main(folder: Path, url: str, steps: int) -> None:
    config = TrainConfig(
        target="chaos_agent:run", data="none.jsonl", model="none", batch_size=4, group_size=4, steps=steps,
        save_every=1, max_attempts=1000, timeout_s=20.0, seed=7,
    )  # fmt: skip
    store = HttpStore(url, key=os.environ["LIGHTNING_KEY"], patience_s=60.0)
    runner: Any = SimpleNamespace(
        check=lambda: None, wake=lambda: None, describe=lambda: "chaos", attached=("chaos",), ended=0
    )
    state = State(step=0, identity={})
    if (folder / "checkpoint").exists():
        state = read_state(find(folder)[1])
    # What the last life left in the queue, nobody waits for any more.
    old = [r.rollout_id for status in ("queued", "running") for r in store.rollouts(status=status)]
    store.cancel(old)
    learner: Any = Learner(folder / "batches.jsonl")
    log: Any = Log()
    run = OpenRun(
        config=config, tasks=TASKS, val=[], store=store, runner=runner, log=log, progress=Silent(),
        check=lambda: None, folder=folder,
    )  # fmt: skip
    app: Any = None
    session = Session(store=store, runner=runner, url=url, app=app, answers=AnswerSource())
    learner.loop = Loop(run, session, learner, state)
    learner.loop.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
