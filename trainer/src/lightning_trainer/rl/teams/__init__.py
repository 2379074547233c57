"""What several agents that learn together need: how much each one's calls weigh."""
