"""Better system prompts for agents of a program that stays as it is: read from traces, proposed, tried on the wire."""
