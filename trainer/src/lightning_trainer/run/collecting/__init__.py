"""Rollouts of a step: planned, queued ahead, waited for."""
