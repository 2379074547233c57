"""Backends generate with a policy and update it; they are chosen by name. `protocol` describes them."""
