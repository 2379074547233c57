"""``/api``: rollouts, attempts, records and rewards over HTTP."""
