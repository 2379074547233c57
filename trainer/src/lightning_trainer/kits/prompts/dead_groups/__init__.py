"""Tasks that no rollout solves are sampled under a better instruction, and the successes are learned without it.

P2O, arXiv 2603.21877. The instruction is proposed as in `lightning-rl prompts`. We depart from the paper's method in
one thing: an instruction is written for an agent from a few dead tasks, and is tried on others too, instead of a search
for each task.
"""
