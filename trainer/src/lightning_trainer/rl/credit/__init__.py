"""Credit: how the rewards of an attempt are assigned to its transitions."""
