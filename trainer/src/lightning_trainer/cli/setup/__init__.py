"""Commands for the first day: a project to begin with, and what works on this machine."""
