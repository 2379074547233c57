"""Runs, and what they leave behind."""
