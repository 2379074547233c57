"""Recording in the agent's process: which agent calls, what the calls contain, and how spans reach the store."""
