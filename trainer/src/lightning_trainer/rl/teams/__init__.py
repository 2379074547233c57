"""For several agents that learn together: the weight of each one's calls."""
