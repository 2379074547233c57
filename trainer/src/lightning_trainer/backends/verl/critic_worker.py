"""verl's training worker for the critic, with our registrations made before it makes its engine.

verl makes the critic's model configuration in the trainer's process and sends it ready-made, so `external_lib` is not
imported where the critic lives. Unpickling this class imports it.
"""

from __future__ import annotations

from verl.workers.engine_workers import TrainingWorker

from lightning_trainer.backends.verl import registrations  # noqa: F401 - registers itself


class CriticWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """verl's own."""
