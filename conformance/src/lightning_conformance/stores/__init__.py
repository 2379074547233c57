"""The conformance kit of stores."""
