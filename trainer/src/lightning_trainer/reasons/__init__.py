"""Texts that several layers share: why calls ended, how their prompts were made, and counts with nouns."""
