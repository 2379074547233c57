"""Commands for getting started: create a project, and check this machine."""
