"""Traces of agents, joined to exact tokens."""
