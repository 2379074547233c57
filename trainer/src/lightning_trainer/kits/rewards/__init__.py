"""Rewards under attack: what a policy earns that is instructed to get the reward without doing the task."""
