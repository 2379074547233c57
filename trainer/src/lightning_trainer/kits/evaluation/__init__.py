"""Evaluation of agents: a model, a run or an endpoint on held-out tasks, with intervals, and compared with another."""
