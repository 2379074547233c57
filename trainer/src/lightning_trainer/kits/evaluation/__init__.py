"""Measuring agents: a model, a run or an endpoint on held-out tasks, with intervals, and against another one."""
