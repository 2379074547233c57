"""Traces of a store as data sets for other trainers: conversations, preference pairs, exact tokens, spans."""
