"""The sources of a checkpoint: recorded at each training step, searchable from either end."""
