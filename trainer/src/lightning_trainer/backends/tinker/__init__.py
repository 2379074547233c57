"""The backend named ``tinker``: adapters that a server trains and samples, by the Tinker API.

The server does the forward and backward passes. The losses are ours: it returns log-probabilities, and is sent what
each of them should move by.
"""
