"""Judges: a model ranks the rollouts of a group against each other, and gives each a reward from 0 to 1."""
