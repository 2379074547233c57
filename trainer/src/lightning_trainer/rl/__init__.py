"""Reinforcement learning as pure functions: from traces to rows, advantages and losses."""
