"""What a round can do to make a candidate: train an adapter, search methods, optimise prompts, or try another model."""
