"""Keys: what each permits, and who gives a reward."""
