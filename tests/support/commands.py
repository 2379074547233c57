"""What a model answers to agents that are commands."""

from __future__ import annotations

import json


def call(name, **arguments):
    """A tool call, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(prompt):
    """How many tools have answered in a conversation."""
    return prompt.count("<tool_response>")
