"""Several ways to better agents, on the same tasks with the same budget, measured on the same held-out tasks."""
