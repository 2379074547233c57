"""Kinds of environments: `verifiers` environments and OpenEnv servers."""
