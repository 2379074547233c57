"""Commands that run a program on tasks, to train or to measure it."""
