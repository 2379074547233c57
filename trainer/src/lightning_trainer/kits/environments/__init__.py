"""Kinds of environments that exist: `verifiers` environments and OpenEnv servers."""
