"""Teachers of on-policy distillation: what says how likely each token is that a student sampled, or might have."""
