"""`loop()`: runs the rounds through their stages, without repeating stages that are recorded as done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.errors import RefusedError, StoreError
from lightning_trainer.flags.common import reading
from lightning_trainer.kits.deploy.table import read_histories
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.deployment import CandidateStages
from lightning_trainer.kits.loop.learning import compare, input_of, learn
from lightning_trainer.kits.loop.methods.method import CHECKPOINT, RoundInput
from lightning_trainer.kits.loop.record import (
    STAGES,
    STATUS_NAME,
    LoopRound,
    StageResult,
    Waiting,
    open_round,
    rounds_in,
    write_status,
)
from lightning_trainer.kits.loop.selection import select
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.session.folder import hold_folder, make_folder

LOOPS: Final = Path("loops")  # parent folder of loops without --out, each named after its agent


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPace:
    """How long a call of the loop works.

    Attributes:
        rounds: number of ended rounds after which it returns.
        every_s: seconds between two checks of a stage that waits; None: it returns instead of waiting.
        sleep: function that waits for the given number of seconds.
    """

    rounds: int = 1
    every_s: float | None = 60.0
    sleep: Callable[[float], None] = time.sleep


def loop(config: LoopConfig, out: Path, pace: LoopPace, progress: Progress | None = None) -> list[LoopRound]:
    """Continue the current round, or start the next one.

    Args:
        config: configuration of the loop.
        out: folder of the loop.
        pace: how long this call works.
        progress: callback for progress events. Default: none.

    Returns:
        The rounds that this call worked on, oldest first.

    Raises:
        LightningError: an option, a file or the program is wrong, or the store can't be read at the start. The same
            call continues once it is fixed.
        SavedInterrupt: a stop was requested.
    """
    if pace.every_s is not None:  # from here on, a store that does not answer is waited for
        with reading(config.store, config.key_file) as store:
            read_histories(store)
    folder = make_folder(out, LOOPS).resolve()
    worked = []
    with hold_folder(folder):
        for _ in range(pace.rounds):
            current = open_round(folder, config.options())
            worked.append(current)
            try:
                ended = _Stages(config, current, pace, progress or Silent()).run()
            except KeyboardInterrupt:
                raise SavedInterrupt(
                    f"stopped. The same command continues. Its state: {folder / STATUS_NAME}"
                ) from None
            if not ended:
                break
    return worked


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of one round."""

    config: LoopConfig
    current: LoopRound
    pace: LoopPace
    progress: Progress

    def run(self) -> bool:
        """Run the remaining stages, and return whether the round ended."""
        write_status(self.current.folder.parent)
        for stage in STAGES:
            while self.current.end is None and self.current.result(stage) is None:
                if not self._take(stage):
                    return False
        return True

    def _take(self, stage: str) -> bool:
        """Try a stage once, and return whether to continue."""
        self.progress.note(f"round {self.current.number}: {stage}")
        result = self._work(stage)
        if isinstance(result, StageResult):
            self.current.write(stage, result)
            write_status(self.current.folder.parent)
            return True
        self.current.wait(stage, result.reason)
        write_status(self.current.folder.parent)
        self.progress.note(f"waiting for {result.reason}")
        if self.pace.every_s is None:
            return False
        self.pace.sleep(self.pace.every_s)
        return True

    def _work(self, stage: str) -> StageResult | Waiting:
        if stage == "evaluate":
            return compare(self.config, self.current, self.progress)
        try:
            if stage != "train":
                return self._work_in_store(stage)
            given = self._input()
        except StoreError as error:
            if self.pace.every_s is None or isinstance(error, RefusedError):
                raise
            return Waiting(f"the store: {error}")
        return learn(self.config, given, self.progress)

    def _work_in_store(self, stage: str) -> StageResult | Waiting:
        with reading(self.config.store, self.config.key_file) as store:
            if stage == "select":
                return select(self.config, store, self.current, since(self._earlier))
            candidate = CandidateStages(self.config, store, self.current)
            work = {
                "candidate": candidate.name,
                "shadow": candidate.shadow,
                "canary": candidate.canary,
                "approval": candidate.promote,
            }
            return work[stage]()

    @property
    def _earlier(self) -> list[LoopRound]:
        return [one for one in rounds_in(self.current.folder.parent) if one.number < self.current.number]

    def _input(self) -> RoundInput:
        """Return what the round learns from. If an earlier round made the stable policy, that is where it starts."""
        with reading(self.config.store, self.config.key_file) as store:
            history = read_histories(store).get(self.config.agent, [])
        stable = history[-1].stable if history else None
        made = (one.facts("train") for one in reversed(self._earlier) if one.facts("candidate").get("policy") == stable)
        model = next((str(facts[CHECKPOINT]) for facts in made if CHECKPOINT in facts), None)
        return input_of(self.current, model, stable)


def since(rounds: Sequence[LoopRound]) -> int:
    """Return the start of the newest trace that these rounds have used, in Unix nanoseconds; 0 for none."""
    return max((int(one.facts("select").get("until_ns", 0)) for one in rounds), default=0)
