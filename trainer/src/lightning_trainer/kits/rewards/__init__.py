"""Attacks on rewards: what a policy earns if it is instructed to get the reward without doing the task."""
