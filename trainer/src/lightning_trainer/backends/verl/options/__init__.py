"""Conversion of a run's configuration to verl's options."""
