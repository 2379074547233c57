"""Recorded attempts run again: with another answer to one call, against new code, or against another model."""

from lightning_trainer.replaying.forking import ForkConfig, Forked, fork
from lightning_trainer.replaying.regression import Regression, ReplayConfig, replay_all
from lightning_trainer.replaying.running import Program

__all__ = ["ForkConfig", "Forked", "Program", "Regression", "ReplayConfig", "fork", "replay_all"]
