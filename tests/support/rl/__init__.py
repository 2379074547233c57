"""Attempts, calls and rewards without a store."""
