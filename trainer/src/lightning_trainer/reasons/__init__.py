"""Why calls ended and how their prompts were made, as text that is recorded and counted."""
