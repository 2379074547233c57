"""LiteLLM: record the calls that it sends itself, send them to a policy, and replay them."""
