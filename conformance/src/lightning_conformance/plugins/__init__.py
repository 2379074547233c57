"""The conformance kit of plugins."""
