"""One way to run a program on tasks under a policy, and the folder that such work is resumed from."""
