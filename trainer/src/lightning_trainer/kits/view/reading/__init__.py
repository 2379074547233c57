"""What each answer says, read from a run's store and folder."""
