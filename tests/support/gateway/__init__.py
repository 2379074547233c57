"""Conversations over the gateway, clients that hold them, and servers behind it."""
