"""Replays: model calls and tool calls answered from the record of an earlier attempt, up to the call that is forked."""
