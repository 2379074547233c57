"""Chooses the best method for each agent within one token budget: prompts, fine-tuning, RL or distillation."""
