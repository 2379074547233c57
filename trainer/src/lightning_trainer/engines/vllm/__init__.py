"""vLLM as the engine of a learner, in separate processes, used over its public HTTP interface."""
