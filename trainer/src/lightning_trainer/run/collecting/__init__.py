"""Rollouts of a step: planned, queued ahead, awaited."""
