"""Keys: what each opens, and whose word a reward is."""
