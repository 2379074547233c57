"""What can be a policy besides a model of the server: adapters and prompts."""
