"""Which policy learns when, against which weights, and with which baseline."""
