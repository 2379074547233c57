"""The configuration of a run: its options, their defaults, what contradicts what, and the files they stand in."""
