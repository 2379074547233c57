"""How models write tool calls and reasoning: one table of formats, one reader, and the probe that chooses."""
