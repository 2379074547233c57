"""The loop from live traces to a better policy in production: select, train, evaluate, shadow, canary, approval."""
