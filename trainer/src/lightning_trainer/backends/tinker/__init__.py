"""The backend named ``tinker``: adapters that a server trains and samples, through the Tinker API.

The server does the forward and backward passes. The losses are ours: the server returns log-probabilities and receives
how far each of them should move.
"""
