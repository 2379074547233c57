"""How frameworks are instrumented: patches, contexts that are entered and left, open spans that are tracked."""
