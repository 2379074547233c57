"""A training run: opens what it needs, runs its loop, saves its state."""
