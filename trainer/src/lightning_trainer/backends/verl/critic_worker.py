"""verl's training worker for the critic, with our registrations in place before it creates its engine.

verl creates the critic's model configuration in the trainer's process and sends the finished object, so `external_lib`
is not imported in the critic's process. Unpickling this class imports it.
"""

from __future__ import annotations

from lightning_trainer.backends.verl import registrations  # noqa: F401 - registers itself
from lightning_trainer.backends.verl.learner_worker import LearnerWorker


class CriticWorker(LearnerWorker):
    """The worker of the critic."""
