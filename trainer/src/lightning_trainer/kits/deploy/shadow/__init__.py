"""A candidate that answers copies of live calls: no user sees its answers or waits for them."""
