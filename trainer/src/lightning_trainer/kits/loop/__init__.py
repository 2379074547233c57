"""From live traces to a better policy in production, in rounds: select, train, evaluate, shadow, canary, approval."""
