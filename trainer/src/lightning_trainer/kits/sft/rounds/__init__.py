"""Rejection sampling: run the program on the current weights, learn the best attempts, and repeat.

Each round starts from the weights of the round before. The attempts of a round are compared within their task. Those
that earned no more than the worst of the round are not learned, so that a policy that solves no task does not learn
from its failures.

After each round except the last, the state for an exact resume is saved (`state.RoundsState`).
"""
