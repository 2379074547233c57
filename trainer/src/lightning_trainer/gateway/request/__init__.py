"""A chat request read once and wholly."""
