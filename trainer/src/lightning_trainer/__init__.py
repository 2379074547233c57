"""Reinforcement learning for agents that already exist."""
