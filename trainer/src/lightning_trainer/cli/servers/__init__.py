"""Commands that serve: models, stores, runners, and the keys that they ask for."""
