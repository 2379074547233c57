"""Learning: packed rows, losses, optimiser steps."""
