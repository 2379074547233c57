"""Commands that read records: show, compare, export, recompute, delete."""
