"""vLLM as the engine of a learner, in processes of its own, reached over its public HTTP interface."""
