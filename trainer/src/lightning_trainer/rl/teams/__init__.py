"""Teams of agents that learn together: the weight of each agent's calls."""
