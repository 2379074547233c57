"""How models write tool calls and reasoning: the table of formats, the reader, and the probe that detects a model's."""
