"""Inside a worker process: imports the agent, runs its attempts, and turns every failure into a result."""
