"""Metrics and alarms of agents that learn together."""
