"""From a run's configuration to verl's options."""
