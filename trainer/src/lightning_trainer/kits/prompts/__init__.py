"""Better system prompts for agents of an unchanged program: read from traces, proposed, and tried on the wire."""
