"""The contents of each answer, read from a run's store and folder."""
