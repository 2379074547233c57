"""The configuration of a run: its options, their defaults, contradictions between them, and their files."""
