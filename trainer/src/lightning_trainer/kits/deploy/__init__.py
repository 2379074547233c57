"""From a checkpoint to users: which policy answers an agent in production, per agent, with a way back."""
