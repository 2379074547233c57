"""Chooses for each agent what improves it within one budget of tokens: prompts, fine-tuning, RL or distillation."""
