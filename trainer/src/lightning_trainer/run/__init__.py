"""A training run: what it needs is opened, its loop is run, its state is saved."""
