"""Credit: how the rewards of an attempt are shared out over its transitions."""
