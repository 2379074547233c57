"""The viewer: runs, groups, rollouts, calls and credit as web pages, over an interface that only reads."""
