"""Commands that serve models and stores, start runners, and manage the keys for them."""
