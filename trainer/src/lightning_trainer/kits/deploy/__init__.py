"""Deployment of policies from checkpoint to users, per agent, with rollback."""
