"""How fast a run is, and what it waits for."""
