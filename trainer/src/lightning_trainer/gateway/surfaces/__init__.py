"""The ways in which clients request an answer: one module each, all using one common form, the chat completion."""
