"""The single way to run a program on tasks under a policy, and the folder from which such work is resumed."""
