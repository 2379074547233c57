"""Rejection sampling: the program runs on the current weights, what earned most is learned, and again.

Each round begins with the weights that the last one left. A round's attempts are compared within their task; those that
earned no more than the worst of the round teach nothing, so that a policy which solves no task does not learn from its
failures.

After each round what going on exactly needs is kept (`state.RoundsState`), until the last one is done.
"""
