"""verl's steps with our rollouts: prompts in, trajectories out."""
