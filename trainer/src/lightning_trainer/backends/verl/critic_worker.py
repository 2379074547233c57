"""verl's training worker for the critic, with our registrations in place before it creates its engine.

verl creates the critic's model configuration in the trainer's process and sends the finished object, so `external_lib`
is not imported in the critic's process. Unpickling this class imports it.
"""

from __future__ import annotations

from verl.workers.engine_workers import TrainingWorker

from lightning_trainer.backends.verl import registrations  # noqa: F401 - registers itself


class CriticWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """verl's training worker, unchanged."""
