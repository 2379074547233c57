"""Shadow deployment: a candidate answers copies of live calls, and no user sees its answers or waits for them."""
