"""Generation: continuous batching over one key-value cache."""
