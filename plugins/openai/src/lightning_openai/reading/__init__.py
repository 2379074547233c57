"""The answer of a call while it is read: what is recorded of it, and calls whose answer is never read to its end."""
