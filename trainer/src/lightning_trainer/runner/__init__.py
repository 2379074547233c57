"""Runners: rollouts are claimed, and the agent is run on them in worker processes."""
