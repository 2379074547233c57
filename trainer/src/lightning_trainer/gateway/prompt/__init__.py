"""Between messages and tokens: templates, exact continuation, tool calls parsed from text."""
