"""What generates for a learner: the contract in `contract`, and engines that run outside of the learner's process."""
