"""How frameworks are instrumented: patches, contexts entered and left, open spans tracked."""
