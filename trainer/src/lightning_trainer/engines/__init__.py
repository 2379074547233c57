"""Engines that generate for a learner: the contract in `contract`, and engines outside of the learner's process."""
