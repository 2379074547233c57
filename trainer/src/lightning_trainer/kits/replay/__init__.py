"""Recorded attempts run again: with another answer to one call, against new code, or against another model."""

from lightning_trainer.kits.replay.forking import ForkConfig, ForkedAttempt, fork
from lightning_trainer.kits.replay.regression import Regression, ReplayConfig, replay_all
from lightning_trainer.kits.replay.running import Program

__all__ = ["ForkConfig", "ForkedAttempt", "Program", "Regression", "ReplayConfig", "fork", "replay_all"]
