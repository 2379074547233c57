"""HTTP itself: bodies, errors, events, time limits, health and metrics."""
