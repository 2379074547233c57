"""Checkpoint lineage: a callback that writes it, and the command that reads it."""
