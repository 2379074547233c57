"""Forks: an earlier attempt run again up to one of its calls, and on from there with another answer.

`recorded` reads the attempt, `plan` makes rollouts that a session or any runner runs, and `result` says what
became of them. `lightning_trainer.kits.replay` does all of it with a program and a model.
"""

from lightning_trainer.kits.forks.planning import Recorded, plan, recorded
from lightning_trainer.kits.forks.results import Continuation, EndedFork, ForkResult, result

__all__ = ["Continuation", "EndedFork", "ForkResult", "Recorded", "plan", "recorded", "result"]
