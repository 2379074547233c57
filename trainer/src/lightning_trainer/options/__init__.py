"""Options that several commands share, each declared once with its help, default and check.

A record is a group of related options. A command's configuration inherits the records that it needs.
"""
