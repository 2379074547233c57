"""Runners: claim rollouts, and run the agent on them in worker processes."""
