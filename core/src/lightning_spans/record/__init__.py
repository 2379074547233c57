"""Recording in the agent's process: who calls, what the calls say, and how it reaches the store."""
