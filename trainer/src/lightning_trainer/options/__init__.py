"""Options that several commands have, each declared once with its help, its default and its check.

A record is a few options that belong together. The configuration of a command inherits the records that it needs.
"""
