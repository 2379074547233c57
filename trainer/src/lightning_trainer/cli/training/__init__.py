"""Commands that run a program on tasks, to learn from it or to measure it."""
