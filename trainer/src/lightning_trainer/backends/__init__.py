"""Backends: what generates with a policy and updates it, chosen by name. `protocol` says what one is."""
