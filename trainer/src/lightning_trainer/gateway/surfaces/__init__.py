"""The ways in which clients ask for an answer: one module each, all of them through one form, the chat completion."""
