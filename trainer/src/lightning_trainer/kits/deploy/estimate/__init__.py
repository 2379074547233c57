"""Estimates a candidate's outcome from recorded calls of the stable policy, before the candidate answers users."""
