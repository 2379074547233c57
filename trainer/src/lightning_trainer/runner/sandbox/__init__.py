"""Sandboxes for commands: what they see, and the one address that they can reach."""
