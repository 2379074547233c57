"""Model folders: read, checked, written."""
