"""The lines of a run's metrics file, whoever wrote it."""
