"""Between messages and tokens: templates, exact continuation, tool calls read from text."""
