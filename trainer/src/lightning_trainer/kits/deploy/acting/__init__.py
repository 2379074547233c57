"""Transitions that a person makes on the viewer's page."""
