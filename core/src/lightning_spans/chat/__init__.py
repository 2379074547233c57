"""Requests to models and their responses, read in one place."""
