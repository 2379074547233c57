"""Which policy learns when, against which weights, and what its rewards are compared with."""
