"""Inside a worker process: it imports the agent, runs attempts of it, and makes a result of whatever goes wrong."""
