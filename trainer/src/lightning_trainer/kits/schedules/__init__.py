"""Which policy learns when, and what its rewards are compared with, in teams and in self-play."""
