"""Optional features, one folder each: the frame imports none of them, and a run without one is complete."""
