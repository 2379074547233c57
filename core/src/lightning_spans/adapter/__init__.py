"""From spans to transitions: the tree of an attempt, each call joined to its tokens."""
