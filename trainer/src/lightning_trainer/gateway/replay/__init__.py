"""Replays: answer model and tool calls from the record of an earlier attempt, up to the forked call."""
