"""LiteLLM: calls that it sends by itself are recorded, led to a policy, and given in replays."""
