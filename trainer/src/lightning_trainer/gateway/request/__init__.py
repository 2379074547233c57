"""A chat request, parsed once and completely."""
